"""What recover-run says of a training's own flags, and of the loss of a node, before anything is imported."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from recover_megatron.launch import command
from recover_megatron.launch.command_line import arguments, preflight, readers
from recover_megatron.launch.command_line.forecast import Control, Forecast, forecast
from recover_megatron.launch.command_line.script import Script
from recover_megatron.launch.command_line.spec import LaunchSpec
from recover_megatron.launch.nodes.host import Host
from tests.harness import REPOSITORY
from tests.harness.processes import python

RECIPES = REPOSITORY / "scripts" / "recipes"
TRAINING = "pretrain_gpt_recover.py"
GOOD = ["--recover", "--mock-data", "--tensor-model-parallel-size", "2"]


SPREAD = ["--expert-model-parallel-size", "4", "--expert-tensor-parallel-size", "1"]
STAGES = ["--pipeline-model-parallel-size", "4"]
CONTEXT = ["--context-parallel-size", "2"]
BATCH = ["--micro-batch-size", "3", "--train-iters", "1", "--global-batch-size"]
TOKENIZER = ["--tokenizer-type"]


def spec_of(script: str, script_args: Sequence[str], world: int = 8, nodes: int = 1, **fields: Any) -> LaunchSpec:
    return LaunchSpec(nproc_per_node=world, nnodes=nodes, script=Script.read(script, script_args), **fields)


def found(*script_args: str, script: str = TRAINING, world: int = 8) -> list[str]:
    return preflight.check(spec_of(script, script_args, world))


def test_a_good_command_line_is_let_through() -> None:
    assert found(*GOOD) == []
    assert found("--help") == []


@pytest.mark.parametrize(
    ("script_args", "world", "words"),
    [
        (["--recover-hangtimeout", "5", *GOOD], 8, "unknown flag --recover-hangtimeout: did you mean --recover-hang-"),
        (
            ["--recover-hang-timeout", "60s", *GOOD],
            8,
            "--recover-hang-timeout: give a number, without a unit, not '60s'",
        ),
        (["--recover-spares=many", *GOOD], 8, "--recover-spares: give a whole number, not 'many'"),
        (["--recover-spares", *GOOD], 8, "--recover-spares: needs a value, --recover-spares N"),
        (["--recover-hang", "5", *GOOD], 8, "unknown flag --recover-hang: did you mean --recover-hang-timeout?"),
        (["--recover_spares", "1", *GOOD], 8, "unknown flag --recover_spares: did you mean --recover-spares?"),
        (["-recover-spares", "1", *GOOD], 8, "unknown flag -recover-spares: did you mean --recover-spares?"),
        (["\u2014Recover-spares", "1", *GOOD], 8, "did you mean --recover-spares?"),
        ([*GOOD, "--recover", "true"], 8, "--recover takes no value: remove true"),
        ([*GOOD, "--recover-spares", "1", "2"], 8, "--recover-spares takes one value: remove 2"),
        ([*GOOD, "--recover-balance=1"], 8, "--recover-balance takes no value: write only --recover-balance"),
        ([*GOOD, "--recover-log-dir", __file__], 8, "is not a folder): choose another"),
        (["--recover-heartbeat-timeout", "1", *GOOD], 8, "--recover-heartbeat-timeout 1 must be at least twice"),
        (["--recover-inject", "1@2:backward", "--mock-data"], 8, "--recover-inject needs --recover"),
        (["--recover-inject", "1@x:backward", *GOOD], 8, "--recover-inject: fault '1@x:backward': not of the form"),
        (["--recover-inject", "8@1:backward", *GOOD], 8, "there is no worker 8; the workers are 0 to 7"),
        (["--recover-min-replicas", "5", *GOOD], 8, "this run has 4 replicas at its launch (8 workers, 2 per replica)"),
        (
            [*GOOD, *SPREAD, "--recover-min-replicas", "3"],
            8,
            "this run has 2 replicas at its launch (8 workers, 4 per replica)",
        ),
        ([*GOOD, "--recover-max-replicas", "3"], 8, "--recover-max-replicas 3: this run has 4 replicas at its launch"),
        (["--expert-tensor-parallel-size", "3", *GOOD], 8, "of 3 workers (EP 1, --expert-tensor-parallel-size 3)"),
        ([*GOOD, "--num-attention-heads", "5"], 8, "5 is not a multiple of --tensor-model-parallel-size 2"),
        (
            [*GOOD, "--num-layers", "5", *STAGES],
            8,
            "--num-layers 5 is not a multiple of --pipeline-model-parallel-size 4",
        ),
        ([*GOOD, "--seq-length", "6", *CONTEXT], 8, "6 is not a multiple of 2 x --context-parallel-size 2"),
        ([*GOOD, "--num-experts", "3", *SPREAD], 8, "3 is not a multiple of --expert-model-parallel-size 4"),
        ([*GOOD, *BATCH, "18"], 8, "18 is not a multiple of --micro-batch-size 3 x 4 data-parallel ranks"),
        ([*GOOD, *BATCH, "18", "--rampup-batch-size", "12", "6", "100"], 8, "18 is not a multiple of --micro-batch"),
        ([*GOOD, "--num-distributed-optimizer-instances", "3"], 8, "3 does not divide the 4 data-parallel ranks"),
        ([*GOOD, "--seq-length", "8", "--max-position-embeddings", "4"], 8, "--max-position-embeddings 4 is below"),
        ([*GOOD, "--num-layers", "4", "2"], 8, "--num-layers 4 2: give one whole number"),
        (["--recover", "--tensor-model-parallel-size", "two"], 8, "--tensor-model-parallel-size two: give one whole"),
        ([*GOOD, "--save", "there"], 8, "--save needs --save-interval N"),
        (
            [*GOOD, "--micro-batch-size", "1", "--num-layers", "2"],
            8,
            "the length of the training is missing: give --train-iters N, or --train-samples N",
        ),
        (["--pipeline-model-parallel-size=3", *GOOD], 8, "8 workers cannot form complete replicas of 6"),
        (["--expert-model-parallel-size", "8", *GOOD], 8, "cannot form complete sets of experts, of 16 workers (EP 8)"),
        (["--recover", "--micro-batch-size", "1", "--train-iters", "1"], 8, "no training data"),
        (["--recover", "--dataloader-type", "cyclic", "--data-path", "here/x"], 8, "--data-path here/x: no here/x.bin"),
        (["--recover", "--data-path", "0.5", "here/x"], 8, "--data-path here/x: no here/x.bin and here/x.idx"),
        (["--vocab-file", "none.json", *GOOD], 8, "--vocab-file none.json: no such file"),
        (["--yaml-cfg", "none.yaml", *GOOD], 8, "--yaml-cfg none.yaml: no such file"),
        ([*TOKENIZER, "TikTokenizer", "--tokenizer-model", "none", *GOOD], 8, "--tokenizer-model none: no such file"),
        ([*TOKENIZER, "HuggingFaceTokenizer", "--tokenizer-model", "./none", *GOOD], 8, "--tokenizer-model ./none: no"),
    ],
)
def test_each_mistake_is_one_line_with_what_to_change(script_args: list[str], world: int, words: str) -> None:
    reasons = found(*script_args, world=world)
    assert len(reasons) == 1, reasons
    assert words in reasons[0]


@pytest.mark.parametrize("flag", ["--recover-metrics", "--recover-metrics-file"])
def test_metrics_without_their_package_are_refused_by_the_flag_that_was_given(
    flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert found(flag, "9400", *GOOD) == [
        f"{flag} needs the Python package prometheus-client: pip install 'recover-megatron[metrics]'"
    ]


def test_a_fault_may_strike_a_worker_that_comes_to_a_run_that_may_grow() -> None:
    assert found("--recover-inject", "8@1:backward", "--recover-max-replicas", "8", *GOOD) == []


def test_data_that_is_there_or_elsewhere_is_no_mistake(tmp_path: Path) -> None:
    for suffix in (".bin", ".idx"):
        (tmp_path / f"text{suffix}").touch()
    assert found("--data-path", str(tmp_path / "text")) == []
    assert found("--data-path", "s3://bucket/text") == []
    (tmp_path / "all.yaml").touch()
    assert found("--yaml-cfg", str(tmp_path / "all.yaml"), "--tensor-model-parallel-size", "3") == []


@pytest.mark.parametrize(
    "script_args",
    [
        [*STAGES, "--num-layers", "7", "--account-for-loss-in-pipeline-split"],
        [*STAGES, "--num-layers", "9", "--decoder-first-pipeline-num-layers", "3"],
        [*STAGES, "--num-layers", "5", "--hybrid-layer-pattern", "M*M*"],
        [*BATCH, "18", "--step-batch-size-schedule", "0:24"],
        [*BATCH, "18", "--decrease-batch-size-if-needed"],
        ["--num-attention-heads", "5", "--use-checkpoint-args"],
        ["--use-checkpoint-args", "--use-mp-args-from-checkpoint-args", "--tensor-model-parallel-size", "3"],
        ["--hidden-size", "100", "--num-attention-heads", "8", "--kv-channels", "16"],
        [*BATCH, "36", "--overlap-grad-reduce", "--lr-decay-style", "cosine", "--override-opt-param-scheduler"],
        [*TOKENIZER, "HuggingFaceTokenizer", "--tokenizer-model", "meta-llama/Llama-3.1-8B"],
        [*TOKENIZER, "NullTokenizer", "--tokenizer-model", "/none"],
        ["--save", "s3://bucket/run", "--save-interval", "1", "--wandb-exp-name", "recover-balance"],
        ["--recover-spares", "1", "--recover-grace", "3", "--recover-balance"],
        ["--micro-batch-size", "1", "--global-batch-size", "8"],
    ],
)
def test_what_megatron_may_take_is_let_through(script_args: list[str]) -> None:
    """Where another flag has it count otherwise; tried with its own checks."""
    assert found(*GOOD, *script_args) == []


def test_of_what_another_flag_changes_the_rest_is_looked_at() -> None:
    words = ["--overlap-grad-reduce", "--override-opt-param-scheduler", *BATCH, "18"]
    assert "18 is not a multiple" in found(*GOOD, *words)[0]


def test_no_configuration_of_the_recipes_is_refused() -> None:
    recipes = [line for path in sorted(RECIPES.glob("*.tsv")) for line in path.read_text().splitlines()]
    lines = [line.partition("\t")[2] for line in recipes if not line.startswith("#")]
    assert len(lines) > 200
    for line in lines:
        words = [word for flag in line.split() for word in re.split("[=,]", f"--{flag}")]
        assert found("--recover", *words, world=9 << 14) == [], line


def test_all_values_that_cannot_be_read_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(found("--recover-spares", "x", "--recover-domain", "--recover-grace", "3s", *GOOD)) == 3
    monkeypatch.setenv("RECOVER_LOG_DIR", "/proc/of-a-run/around-this-one")
    assert found(*GOOD) == [], "the launcher sets it anew"


def test_the_files_of_blends_are_read(tmp_path: Path) -> None:
    (tmp_path / "here.bin").touch()
    (tmp_path / "here.idx").touch()
    blend, splits = tmp_path / "blend.txt", tmp_path / "splits.json"
    blend.write_text(f"0.3 {tmp_path}/here\n0.7 {tmp_path}/gone s3://bucket/x\n")
    splits.write_text(
        json.dumps({"train": [0.5, f"{tmp_path}/here", 0.5, "gone"], "valid": "gone2 gone3", "test": None})
    )
    assert [reason.split(":")[0] for reason in found("--recover", "--data-args-path", str(blend))] == [
        f"--data-args-path {tmp_path}/gone"
    ]
    told = [reason.split(":")[0].split()[1] for reason in found("--recover", "--per-split-data-args-path", str(splits))]
    assert told == ["gone", "gone2", "gone3"]
    splits.write_text("{ not JSON")
    assert found("--recover", "--per-split-data-args-path", str(splits)) == [], "Megatron says what it is"


def test_more_workers_than_gpus_are_refused_where_processes_may_use_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = {"CUDA_VISIBLE_DEVICES": "0,1"}
    monkeypatch.setattr(preflight.importlib.metadata, "distributions", lambda **_: [])
    monkeypatch.setattr(preflight, "GPUS", str(tmp_path / preflight.GPUS.removeprefix("/dev/")))
    (tmp_path / "nvidiactl").touch()
    assert preflight.devices(spec_of(TRAINING, GOOD, 3, environ=two)) == []
    (tmp_path / "nvidia3").touch()  # all that a container has
    three, others = spec_of(TRAINING, GOOD, 3, environ=two), spec_of("train.py", GOOD, 3, environ=two)
    assert "3 workers on this node, including spares, but it has 2 GPUs" in preflight.devices(three)[0]
    assert preflight.devices(spec_of(TRAINING, GOOD, 2, environ=two)) == preflight.devices(others) == []
    assert preflight.devices(spec_of(TRAINING, [*GOOD, "--recover-device", "cpu"], 3, environ=two)) == []


def test_the_folder_of_checkpoints_is_tried_before_anything_is_started(tmp_path: Path) -> None:
    """In /proc root may write, by its permissions, and nobody can."""
    for folder, words in (("/proc/none", ["--save /proc/none cannot be written ("]), (str(tmp_path / "a" / "b"), [])):
        options, _ = arguments.parse([TRAINING, *GOOD, "--save", folder])
        reasons = command._check_folders(options)
        assert [word in reason for word, reason in zip(words, reasons, strict=True)] == [True] * len(words)
    assert list((tmp_path / "a" / "b").iterdir()) == []


@pytest.mark.parametrize("node", ["--node-rank 1 --nnodes 2 --master-addr h", "--join --recover-coordinator h:1"])
def test_every_node_of_a_run_that_recovers_tries_the_folder_of_checkpoints_and_names_itself(node: str) -> None:
    """Each may have to write when others are lost."""
    join = ["--world-size", "8", "--master-addr", "h", "--master-port", "1"] * node.startswith("--join")
    options, problems = arguments.parse([*node.split(), *join, TRAINING, *GOOD, "--save", "/proc/none"])
    (reason,) = command._check_folders(options)
    assert problems == []
    assert f"--save /proc/none cannot be written (No such file or directory) on host {socket.gethostname()}" in reason
    script = Script.read(TRAINING, [word for word in options.script.args if word != "--recover"])
    assert command._check_folders(replace(options, script=script)) == []


def test_a_script_that_imports_megatrons_pretrain_is_known_by_that_whatever_its_name(tmp_path: Path) -> None:
    """But for data, which it may have itself."""
    script, wrong = tmp_path / "train.py", ["--recover", "--tensor-model-parallel-size", "3"]
    for source, known in (
        ("from megatron.training import get_args, pretrain as go", True),
        ("if True:\n    from megatron.training.training import pretrain", True),
        ("from megatron.training import get_args", False),
        ("from elsewhere import pretrain", False),
        ("not Python", False),
    ):
        script = script.with_stem(f"{script.stem}x")  # what was found of a file is remembered
        script.write_text(source)
        assert (found(*wrong, script=str(script)) != []) is known
        assert (forecast(spec_of(str(script), ["--recover", *BATCH, "8"], 4, 2)) is not None) is known
        assert found("--recover", *BATCH, "24", script=str(script)) == []
    assert found("--recover", *BATCH, "24", script="pretrain_mine.py")[0].startswith("no training data")


def test_a_value_with_a_space_belongs_to_its_own_flag() -> None:
    """A parser that does not know that flag would take it as a second value of the flag before it."""
    assert found(*GOOD, "--seq-length", "8", "--wandb-exp-name=a run of mine") == []
    script = Script.read(TRAINING, ["--seq-length", "8", "--wandb-exp-name=a run of mine", "--mock-data"])
    assert script.given == {"--seq-length": ["8"], "--wandb-exp-name": ["a run of mine"], "--mock-data": []}


def test_of_a_script_that_is_not_megatrons_only_our_own_flags_are_looked_at() -> None:
    assert found("--recover", "--tensor-model-parallel-size", "3", script="mine.py") == []
    assert len(found("--recover", "--recover-spare", "3", script="mine.py")) == 1
    assert found("--recover-spare", "3", script="mine.py") == []
    assert found("--recover", "a file", script="mine.py") == []
    assert found("--save", "out", "--num-layers", "many", script="pretrain_mine.py") == []


def test_the_words_of_torchrun_for_the_number_of_processes_are_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(4):
        (tmp_path / f"0000:0{number}:00.0").mkdir()
    assert readers.workers_by_word("gpu", {}, tmp_path) == readers.workers_by_word("auto", {}, tmp_path) == 4
    assert readers.workers_by_word("gpu", {"CUDA_VISIBLE_DEVICES": "2,3"}, tmp_path) == 2
    assert readers.count_gpus({"CUDA_VISIBLE_DEVICES": "1,-1,2"}, tmp_path) == 1
    assert readers.count_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == 0
    none = tmp_path / "no driver"
    assert readers.workers_by_word("auto", {}, none) == readers.workers_by_word("cpu", {}, none) >= 1
    assert readers.workers_by_word("8", {}, none) is None
    with pytest.raises(ValueError, match="no GPU"):
        readers.workers_by_word("gpu", {}, none)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    options, reasons = arguments.parse(["--nproc-per-node", "gpu", "train.py"])
    assert (options.nproc_per_node, reasons) == (3, [])


def test_a_range_of_nodes_is_refused_with_what_does_its_work() -> None:
    assert arguments.parse(["--nnodes", "2:2", "--node-rank", "1", "train.py"])[0].nnodes == 2
    _, reasons = arguments.parse(["--nnodes", "1:4", "train.py"])
    assert len(reasons) == 1
    assert "Give --nnodes 4" in reasons[0]
    assert "Or give --nnodes 1, with --recover-max-replicas N" in reasons[0]
    assert "recover-run --join" in reasons[0]
    assert arguments.parse(["--nnodes", "4:1", "train.py"])[1] == ["--nnodes '4:1': MIN is above MAX"]


def test_check_says_what_it_finds_and_starts_nothing_and_imports_no_torch(tmp_path: Path) -> None:
    probe = (
        "import sys; from recover_megatron.launch import command; code = command.run(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    run = partial(python, "-c", probe, "--check", "--nnodes", 2, "--nproc-per-node", 4, TRAINING, cwd=tmp_path)
    good = run(*GOOD)
    assert good.returncode == 0, good.stderr
    assert "Megatron's own flags, and what --recover refuses or switches off, are checked when" in good.stderr
    assert "Without --check, this command would start 4 workers on this node, 8 overall" in good.stderr
    bad = run(*GOOD, "--recover-min-replicas", "9")
    assert bad.returncode == 2
    assert "--recover-min-replicas 9: this run has 4" in bad.stderr


PIPELINE = ["--recover", "--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "4"]
OFF = ["--recover-memory-tier", "off"]


def told(flags: list[str], nodes: int, named: Sequence[Sequence[str]] = (), control: Control | None = None) -> Forecast:
    """Of a training with eight workers to a node."""
    found = forecast(spec_of(TRAINING, flags, 8, nodes), named, control)
    assert found is not None
    return found


def rows(found: Forecast) -> list[list[str]]:
    """The cells of the table's lines, its head left out."""
    return [re.split(r"  +", line) for line in found.table()[1:]]


STAGES_LOST = "8 workers, parts of 4 replicas; all workers of 2 of 8 positions"
ORDER, NO_SNAPSHOTS = "--use-tp-pp-dp-mapping", "ends (12): no snapshots (--recover-memory-tier off)"


def test_nodes_of_which_the_same_is_to_be_said_share_a_line_and_the_advice_was_tried() -> None:
    found = told([*PIPELINE, *OFF], 4)
    ends = f"{NO_SNAPSHOTS}, no --save"
    assert rows(found) == [["nodes 0 to 3", STAGES_LOST, ends, f"{ORDER} or --recover-memory-tier auto or --save"]]
    better = told([*PIPELINE, ORDER], 4)
    assert better.table() == ["no loss of one node costs state; at least 3 replicas continue"]
    assert told([*PIPELINE[:3], "--pipeline-model-parallel-size", "2"], 4).table() == [
        "no loss of one node costs state; at least 4 replicas continue, 6 after regrouping"
    ]


@pytest.mark.parametrize(
    ("flags", "then"),
    [
        ([], "3 replicas go back to snapshots in memory"),
        ([*OFF, "--save", "here"], "3 replicas go back to the newest checkpoint"),
        ([*OFF, "--save", "here", "--ckpt-format", "zarr"], "3 replicas go back to the newest checkpoint"),
        ([*OFF, "--save", "here", "--no-save-optim"], f"{NO_SNAPSHOTS}, --no-save-optim"),
        ([*OFF, "--save", "here", "--recover-last-resort", "off"], f"{NO_SNAPSHOTS}, --recover-last-resort off"),
        ([*OFF, "--save", "here", "--recover-min-replicas", "4"], "ends (10): fewer than 4 replicas are left"),
    ],
)  # fmt: skip
def test_what_a_loss_of_state_does_to_the_run_is_said(flags: list[str], then: str) -> None:
    assert [row[:3] for row in rows(told([*PIPELINE, *flags], 4))] == [["nodes 0 to 3", STAGES_LOST, then]]
    if "fewer" not in then:
        spread = [row[:3] for row in rows(told([*PIPELINE, *flags, "--use-distributed-optimizer"], 4))]
        other = f"{NO_SNAPSHOTS}, --ckpt-format zarr" if "zarr" in flags else then
        assert spread == [["nodes 0 to 3", "8 workers, parts of 4 replicas; all copies of some shards", other]]


def test_too_few_workers_for_a_replica_wait_where_others_may_come() -> None:
    wide = ["--recover", "--expert-model-parallel-size", "16", "--num-experts", "16"]
    lost = "8 workers, parts of 1 replica; all workers of 8 of 16 positions"
    spares = "spares on another node, recover-run --join"
    assert rows(told(wide, 2)) == [["nodes 0 to 1", lost, "ends (10): too few workers are left for a replica", spares]]
    waits = told(wide, 2, control=Control((0, 1), lease=True, replaced=True))
    assert rows(waits)[0][2] == "waits five minutes for workers, else ends (10) (silent: with the lease)"
    changes = f"--recover-memory-tier auto or --save; {spares}"
    assert rows(told([*wide, *OFF], 2))[0][2:] == ["ends (10): too few workers are left for a replica", changes]


@pytest.mark.parametrize(
    ("nodes", "control", "cells"),
    [
        (2, Control((0, 1), slack=7), {"node 0": "silent: ends (11)", "node 1": ""}),
        (2, Control((1, 0), slack=7), {"node 1": "silent: ends (11)", "node 0": ""}),
        (2, Control((0, 1), lease=True, slack=7), {"nodes 0 to 1": "silent: with the lease"}),
        (3, Control((0, 1, 2), lease=True, slack=7), {}),
        (3, Control((0, 1, 2)), {}),
    ],
)
def test_what_the_coordinators_need_to_go_on_without_half_is_said(
    nodes: int, control: Control, cells: dict[str, str]
) -> None:
    found = rows(told(["--recover"], nodes, control=control))
    assert {row[0]: row[2].partition("(")[2][:-1] for row in found} == cells


def test_racks_are_told_by_a_list_of_nodes() -> None:
    named = [[f"domain r{node // 2}"] for node in range(4)]
    spread = told(
        [*PIPELINE[:3], "--pipeline-model-parallel-size", "2"], 4, named, Control((0, 2), lease=True, slack=7)
    )
    assert rows(spread) == [
        ["nodes 0 to 3", "8 workers, parts of 4 replicas", "4 replicas continue, 6 after regrouping"],
        [
            "domains r0, r1", "16 workers, parts of 8 replicas; all workers of 2 of 4 positions",
            "4 replicas go back to snapshots in memory (silent: with the lease)", ORDER,
        ],
    ]  # fmt: skip
    near = told(["--recover"], 8, [[f"domain r{node // 4}"] for node in range(8)], Control((0, 1, 2), lease=True))
    assert rows(near)[1][2] == "ends (11): all coordinators are lost"


def test_ten_thousand_workers_are_a_few_lines() -> None:
    named = [[f"domain r{node // 16}"] for node in range(1250)]
    flags = ["--recover", "--pipeline-model-parallel-size", "1250", "--tensor-model-parallel-size", "2"]
    found = told([*flags, "--use-distributed-optimizer"], 1250, named)
    assert [row[0] for row in rows(found)] == ["nodes 0 to 1249", "domains r0, r1, r2, r3 and 74 more", "domain r78"]


def line_of(host: str, *names: str) -> str:
    return f"{host} {','.join(names)}\n"


@pytest.mark.parametrize(
    ("text", "reasons"),
    [
        (None, ["the file cannot be read (No such file or directory)"]),
        ("# nothing\n\n", ["the file names no host: write a line HOST NAME[,NAME...] for each node"]),
        ("a\na r1\n", ["line 1: host a has no domain: write HOST NAME[,NAME...]; line 2: host a is listed twice"]),
        ("a r1 # one\nb r1\n", []),
    ],
)
def test_a_list_of_domains_that_cannot_be_used_is_refused(tmp_path: Path, text: str | None, reasons: list[str]) -> None:
    path = tmp_path / "racks"
    if text is not None:
        path.write_text(text)
    assert found(*GOOD, "--recover-domain", f"@{path}") == [f"--recover-domain @{path}: {its}" for its in reasons]


def test_each_node_has_a_line_in_the_list_and_coordinators_stand_in_several_racks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, argv = tmp_path / "racks", ["--nnodes", "4", "--log-dir", str(tmp_path), TRAINING, *GOOD, "--recover-domain"]
    path.write_text("\ufeff" + "".join(f"n{node}\tr{node // 2}\r\n" for node in range(4)))  # an editor of Windows
    monkeypatch.setenv("RECOVER_HOST", "n3")
    options, _ = arguments.parse([*argv, f"@{path}"])
    assert command._check_domains(options) == []
    assert options.own_domains == ("domain r1",)
    assert options.candidate_nodes == (0, 2, 1)
    plan = replace(options, slurm=True, environ={"SLURM_JOB_NODELIST": "n[2-3],n[0-1]"})
    assert plan.domains == (("domain r1",),) * 2 + (("domain r0",),) * 2, "SLURM's order of nodes"
    assert plan.candidate_nodes == (1, 2, 3), "the first node of SLURM's comes last"
    options = replace(options, nnodes=5, environ={"RECOVER_HOST": "n9"})
    assert len(command._check_domains(options)) == 2
    options = replace(options, check=True)
    assert command._check_domains(options) == [f"--recover-domain @{path}: the file has 4 of 5 nodes: add the others"]


def test_an_order_of_ranks_is_advised_only_where_megatron_takes_it() -> None:
    """With stages, expert and dense data parallelism must be of one size for --use-tp-pp-dp-mapping."""
    pipeline = ["--recover", "--pipeline-model-parallel-size", "4", "--expert-model-parallel-size", "2"]
    alike = [*pipeline, "--tensor-model-parallel-size", "2", "--expert-tensor-parallel-size", "1"]
    assert {*told(pipeline, 4).change} == {""}
    assert {*told(alike, 4).change} == {"--use-tp-pp-dp-mapping"}


def test_shard_groups_are_the_replicas_of_megatron_fsdp() -> None:
    fsdp = ["--use-megatron-fsdp", "--use-distributed-optimizer", "--num-distributed-optimizer-instances", "2"]
    fsdp.append("--recover")
    found = told(fsdp, 2)
    assert found.table() == ["no loss of one node costs state; at least 1 replica continues"]
    assert [loss.broken for loss in found.losses] == [1, 1]
    assert told(["--recover", "--use-megatron-fsdp"], 2) == found, "of one that is asked for --recover makes two"
    outer = [*fsdp, "--outer-dp-sharding-strategy", "optim"]
    assert told(outer, 2) == found  # one of two shard groups has all copies
    alone = [*outer, "--recover-shadow-shards", "0"]
    assert told([*alone, *OFF], 2).then[0].startswith("ends (12)")
    assert told([*alone, *OFF, "--save", "here"], 2).then[0] == "1 replica goes back to the newest checkpoint"
    assert told(alone, 2).then[0] == "1 replica goes back to snapshots in memory"


@pytest.mark.parametrize(
    ("script", "flags", "nodes"),
    [
        (TRAINING, PIPELINE, 1),
        (TRAINING, PIPELINE[1:], 4),
        ("train.py", PIPELINE, 4),
        (TRAINING, [*PIPELINE, "--yaml-cfg", "its.yaml"], 4),
        (TRAINING, [*PIPELINE, "--context-parallel-size", "many"], 4),
        (TRAINING, [*PIPELINE, "--context-parallel-size", "3"], 4),
        (TRAINING, [*PIPELINE, "--context-parallel-size", "0"], 4),
    ],
)
def test_nothing_is_said_of_what_is_not_known(script: str, flags: list[str], nodes: int) -> None:
    assert forecast(spec_of(script, flags, 8, nodes)) is None


def test_at_the_start_node_0_says_it_by_what_all_launchers_tell_of_their_domains(tmp_path: Path) -> None:
    argv = ["--nnodes", "4", "--nproc-per-node", "2", "--log-dir", str(tmp_path), TRAINING, *GOOD]
    options, _ = arguments.parse(argv)
    plan = replace(options, environ={"RECOVER_SECRET": "shared"})
    store, seal = SimpleNamespace(set=lambda key, value: None), SimpleNamespace(wrap=lambda *words: words, proves=True)
    lines: list[str] = []
    events = SimpleNamespace(note=lines.append)
    host = Host(plan, cast(Any, store), cast(Any, seal), cast(Any, events), lambda call, text: call(text), pytest.fail)
    host._announced, host._domains[0] = True, ("domain r0",)
    for rank in (1, 2, 3):
        words = {"host": "h", "nonce": "n", "count": 1, "coordinator": ["h", 1], "domains": [f"domain r{rank // 2}"]}
        assert not lines
        assert host._heard(rank, words)
    assert [line.split("  ")[1] for line in lines[2:]] == ["domain", "nodes 0 to 3", "domain r0", "domain r1"]
