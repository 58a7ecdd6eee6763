"""What recover-run says of the loss of a node, before anything is started."""

from __future__ import annotations

import pytest

from recover_megatron.launch.preflight import forecast

SCRIPT = "pretrain_gpt_recover.py"
PIPELINE = ["--recover", "--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "4"]
OFF = ["--recover-memory-tier", "off"]


def test_nodes_of_which_the_same_is_to_be_said_share_a_line_and_the_advice_was_tried() -> None:
    found = forecast(SCRIPT, [*PIPELINE, *OFF], 4, 8)
    assert found is not None
    assert found.table() == [
        "one of nodes 0 to 3: 8 workers lost, 4 replicas broken, the run ends: of 2 of the 8 positions of a replica "
        "every worker is there",
        "With --use-tp-pp-dp-mapping no loss of one node does that.",
    ]
    assert found.warning().startswith("the loss of one of nodes 0 to 3 would end this run: of 2 of the 8 positions")
    better = forecast(SCRIPT, [*PIPELINE, "--use-tp-pp-dp-mapping"], 4, 8)
    assert better is not None
    assert better.table() == ["one of nodes 0 to 3: 8 workers lost, 1 replica broken, 3 go on"]
    assert better.warning() == ""


def test_what_the_memory_tier_keeps_does_not_end_the_run() -> None:
    found = forecast(SCRIPT, PIPELINE, 4, 8)
    assert found is not None
    assert found.table() == [
        "one of nodes 0 to 3: 8 workers lost, 4 replicas broken, 3 go back to snapshots in memory: of 2 of the 8 "
        "positions of a replica every worker is there",
        "With --use-tp-pp-dp-mapping no loss of one node does that.",
    ]
    assert found.warning() == ""
    spread = forecast(SCRIPT, [*PIPELINE, "--use-distributed-optimizer"], 4, 8)
    assert spread is not None
    assert spread.warning() == ""
    assert "3 go back to snapshots in memory: parts of the optimizer's state have all their" in spread.table()[0]


def test_where_no_flag_helps_that_is_said() -> None:
    wide = ["--recover", "--expert-model-parallel-size", "16", "--num-experts", "16"]
    found = forecast(SCRIPT, [*wide, *OFF], 2, 8)
    assert found is not None
    assert found.advice.startswith("No flag changes that: save checkpoints")
    kept = forecast(SCRIPT, wide, 2, 8)
    assert kept is not None
    assert "1 replica broken, the run ends unless workers come in their place: of 8 of the 16" in kept.table()[0]
    assert "all go back to snapshots in memory" in kept.warning()


def test_an_order_of_ranks_is_advised_only_where_megatron_takes_it() -> None:
    """With stages, expert and dense data parallelism must be of one size for --use-tp-pp-dp-mapping."""
    pipeline = ["--recover", "--pipeline-model-parallel-size", "4"]
    spread = forecast(SCRIPT, [*pipeline, "--expert-model-parallel-size", "2"], 4, 8)
    alike = forecast(SCRIPT, [*pipeline, "--expert-model-parallel-size", "2", "--tensor-model-parallel-size", "2",
                              "--expert-tensor-parallel-size", "1"], 4, 8)  # fmt: skip
    assert spread is not None
    assert alike is not None
    assert spread.advice == "No flag changes that."
    assert alike.advice == "With --use-tp-pp-dp-mapping no loss of one node does that."


def test_shard_groups_are_the_replicas_of_megatron_fsdp() -> None:
    fsdp = ["--use-megatron-fsdp", "--use-distributed-optimizer", "--num-distributed-optimizer-instances", "2"]
    found = forecast(SCRIPT, ["--recover", *fsdp], 2, 8)
    assert found is not None
    assert found.table() == ["one of nodes 0 to 1: 8 workers lost, 1 replica broken, 1 go on"]
    outer = forecast(SCRIPT, ["--recover", *fsdp, "--outer-dp-sharding-strategy", "optim"], 2, 8)
    assert outer == found  # one of two shard groups has all copies
    alone = ["--outer-dp-sharding-strategy", "optim", "--recover-shadow-shards", "0"]
    assert "would end this run" in forecast(SCRIPT, ["--recover", *fsdp, *alone, *OFF], 2, 8).warning()
    assert "1 go back to snapshots in memory" in forecast(SCRIPT, ["--recover", *fsdp, *alone], 2, 8).table()[0]


@pytest.mark.parametrize(
    ("script", "flags", "nodes"),
    [
        (SCRIPT, PIPELINE, 1),
        (SCRIPT, PIPELINE[1:], 4),
        ("train.py", PIPELINE, 4),
        (SCRIPT, [*PIPELINE, "--yaml-cfg", "its.yaml"], 4),
        (SCRIPT, [*PIPELINE, "--context-parallel-size", "many"], 4),
        (SCRIPT, [*PIPELINE, "--context-parallel-size", "3"], 4),
    ],
)
def test_nothing_is_said_of_what_is_not_known(script: str, flags: list[str], nodes: int) -> None:
    assert forecast(script, flags, nodes, 8) is None
