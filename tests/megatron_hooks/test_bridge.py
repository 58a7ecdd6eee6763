"""Megatron-Bridge: the functions that are wrapped, and deaths in a loop with its seams, by real signals.

The functions are compared with its releases and with the double that trains; RECOVER_BRIDGE_SOURCE names a checkout of
Megatron-Bridge, or an unpacked wheel, to compare with besides.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recover_megatron.arguments import RecoverConfig
from recover_megatron.errors import Disagreement
from recover_megatron.megatron_hooks.loop import bridge
from recover_megatron.megatron_hooks.loop.bridge_arguments import SECTIONS, BridgeArguments
from recover_megatron.run_log.steps import StepRecord, read_steps, violations
from scripts.check_megatron import Sources, misfits, signatures
from tests.harness import REPOSITORY
from tests.harness.forkserver import ForkServer, Run

SCRIPT = str(Path(__file__).parent / "bridge_script.py")


def train(forkserver: ForkServer, out: Path, *flags: str, restarts: int = 0) -> Run:
    argv = [SCRIPT, "--recover", "--recover-log-dir", str(out), *flags]
    return forkserver.run(2, argv, out, environment={"PARAMETERS": str(out)}, timeout=120, restarts=restarts)


def steps(out: Path) -> list[StepRecord]:
    found = list(read_steps(out / "steps.jsonl"))
    assert violations(found, 8) == []
    return found


def told(log: Path) -> list[float]:
    """The numbers of the last line that the loop prints of an iteration and of an evaluation: its own counts and sums.

    Those that an iteration counts by the launch's sizes: what it has consumed, operations, the sum of all losses.
    """
    lines = log.read_text().splitlines()
    last = [[line for line in lines if line.startswith(kind)][-1] for kind in ("iteration ", "validation ")]
    return [float(number) for line in last for number in re.findall(r"\d[\d.e+-]*", line)]


@pytest.mark.slow
@pytest.mark.parametrize("spread", [False, True], ids=["plain", "distributed-optimizer"])
def test_a_death_in_bridges_loop_changes_nothing_but_rounding(
    forkserver: ForkServer, tmp_path: Path, spread: bool
) -> None:
    flags = ["--spread"] * spread
    whole, hit = tmp_path / "whole", tmp_path / "hit"
    assert (run := train(forkserver, whole, *flags, "--save", str(whole / "saved"))).ok, run.tail()
    struck = train(forkserver, hit, *flags, "--save", str(hit / "saved"), "--recover-inject", "1@3:backward")
    assert struck.codes == [0, -9], struck.tail()
    for one, other in zip(steps(whole), steps(hit), strict=True):
        assert other.loss == pytest.approx(one.loss, rel=1e-5)
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)
        assert other.consumed_samples == one.consumed_samples
    assert [step.replicas for step in steps(hit)] == [2, 2, 1, 1, 1, 1]
    expected, found = torch.load(whole / "0.pt"), torch.load(hit / "0.pt")
    for name, parameter in expected.items():
        torch.testing.assert_close(found[name], parameter, rtol=1e-4, atol=1e-5)
    assert told(struck.logs[0]) == pytest.approx(told(run.logs[1]), rel=1e-5)
    saved = sorted(str(path.relative_to(whole / "saved")) for path in (whole / "saved").rglob("*"))
    assert saved == sorted(str(path.relative_to(hit / "saved")) for path in (hit / "saved").rglob("*"))
    assert {path.name for path in (whole / "saved").iterdir() if path.is_dir()} == {"iter_0000003", "iter_0000006"}


@pytest.mark.slow
def test_a_worker_that_comes_in_its_place_trains_what_the_lost_one_would_have(
    forkserver: ForkServer, tmp_path: Path
) -> None:
    whole, hit = tmp_path / "whole", tmp_path / "hit"
    assert (run := train(forkserver, whole, "--patient")).ok, run.tail()
    struck = train(forkserver, hit, "--patient", "--recover-inject", "1@3:backward", restarts=1)
    assert (struck.codes, struck.more) == ([0, -9], {2: 0}), struck.tail()
    assert [step.replicas for step in steps(hit)][-2:] == [2, 2]
    for one, other in zip(steps(whole), steps(hit), strict=True):
        assert other.loss == pytest.approx(one.loss, rel=1e-5)
        assert other.consumed_samples == one.consumed_samples
    assert told(hit / "worker-2.log") == pytest.approx(told(run.logs[1]), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("strike", ["0@3:checkpoint", "1@3:eval", "1@4:optimizer"])
def test_deaths_beside_the_steps_of_bridges_loop_are_survived(
    forkserver: ForkServer, tmp_path: Path, strike: str
) -> None:
    struck = train(forkserver, tmp_path, "--save", str(tmp_path / "saved"), "--recover-inject", strike)
    victim = int(strike[0])
    assert struck.codes[victim] == -9
    assert struck.codes[1 - victim] == 0, struck.tail()
    assert [step.consumed_samples for step in steps(tmp_path)] == [8, 16, 24, 32, 40, 48]
    folders = [path for path in (tmp_path / "saved").iterdir() if path.is_dir()]
    assert sorted(path.name for path in folders) == ["iter_0000003", "iter_0000006"]
    assert all((path / "run_config.yaml").is_file() and (path / "tokenizer").is_dir() for path in folders)


def test_what_was_not_tried_in_bridges_loop_is_refused_before_anything_is_made(
    forkserver: ForkServer, tmp_path: Path
) -> None:
    argv = [SCRIPT, "--recover", "--async-save", "--log-logits", "--save", str(tmp_path)]
    run = forkserver.run(1, argv, tmp_path, together=False, timeout=60)
    said = run.logs[0].read_text()
    assert run.codes == [2], said
    assert "--recover with Megatron-Bridge does not support checkpoint.async_save = True: it is untested" in said
    assert "--recover with Megatron-Bridge does not support model.log_max_attention_logit: it is untested" in said
    assert "Traceback" not in said


RELEASES = json.loads((Path(__file__).parent / "bridge_parameters.json").read_text(encoding="utf-8"))
DOUBLE = REPOSITORY / "tests" / "doubles" / "bridge"


def parameters_of(release: str) -> dict[str, list[str] | None]:
    return {name: its.split() for name, its in RELEASES[release].items()}


@pytest.mark.parametrize("release", RELEASES)
def test_every_function_that_is_wrapped_is_in_the_recorded_releases(release: str) -> None:
    assert misfits(parameters_of(release), bridge.seams()) == {}


def test_a_function_that_is_gone_or_takes_other_arguments_is_named() -> None:
    found = parameters_of("0.6.2")
    step, setup = f"{bridge.TRAIN}.train_step", f"{bridge.PRETRAIN}.setup"
    found |= {step: ["forward_step_func", "model"], setup: None}
    reasons = misfits(found, bridge.seams())
    assert reasons.keys() == {setup, step}
    assert reasons[setup] == f"{setup} does not exist"
    assert reasons[step].startswith(
        f"{step} takes (forward_step_func, model), expected (forward_step_func, data_iterator, "
    )


def test_the_double_takes_what_bridge_takes_in_the_same_order() -> None:
    theirs = parameters_of("0.6.2")
    for name, its in signatures(Sources(DOUBLE), bridge.seams()).items():
        assert its is not None, f"the double has no {name}"
        if every := theirs[name]:  # else it is Megatron-LM's or Megatron-Core's own
            assert [one for one in every if one in its] == its, name


@pytest.mark.skipif("RECOVER_BRIDGE_SOURCE" not in os.environ, reason="RECOVER_BRIDGE_SOURCE names no sources")
def test_every_function_that_is_wrapped_is_in_these_sources() -> None:
    root = Path(os.environ["RECOVER_BRIDGE_SOURCE"])
    root = root / "src" if (root / "src").is_dir() else root
    assert misfits(signatures(Sources(root), bridge.seams()), bridge.seams()) == {}


def test_bridges_configuration_is_read_and_set_by_the_names_of_megatrons_flags() -> None:
    train_state = SimpleNamespace(step=3, consumed_train_samples=24, floating_point_operations_so_far=7)
    config = SimpleNamespace(**{section: SimpleNamespace() for section in SECTIONS}, data_parallel_size=4)
    config.model.num_moe_experts, config.rng.seed, config.optimizer.optimizer = 8, 5, "adam"
    config.checkpoint.ckpt_assume_constant_structure, config.profiling.profile_ranks = True, [0]
    arguments: Any = BridgeArguments(config)
    arguments.attach(config, train_state)
    arguments.loaded()
    assert (arguments.num_experts, arguments.seed, arguments.optimizer) == (8, 5, "adam")
    assert (arguments.iteration, arguments.consumed_train_samples, arguments.data_parallel_size) == (3, 24, 4)
    assert getattr(arguments, "mtp_num_layers", None) is None
    arguments.profile_ranks = [rank + 1 for rank in arguments.profile_ranks]
    assert config.profiling.profile_ranks == [1]
    arguments.ckpt_assume_constant_structure = False
    arguments.consumed_train_samples = 32
    assert config.checkpoint.ckpt_assume_constant_structure is False
    assert train_state.consumed_train_samples == 32
    arguments.iteration, arguments.num_floating_point_operations_so_far = 4, 9
    assert (train_state.step, train_state.floating_point_operations_so_far) == (3, 7)  # Bridge counts by itself
    arguments.entered()
    assert (train_state.step, train_state.floating_point_operations_so_far) == (4, 9)


def test_a_worker_that_counts_other_samples_than_a_batch_does_not_begin_the_next_iteration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bridge, "get_current_running_global_batch_size", lambda: 8)
    run = bridge.BridgeRun(None, None, None, RecoverConfig())
    counted = SimpleNamespace(step=0, consumed_train_samples=0)
    run.arguments.attach(None, counted)
    run._count()
    counted.step, counted.consumed_train_samples = 1, 8
    run._count()
    assert run.arguments.curr_iteration == 1
    counted.consumed_train_samples = 12
    with pytest.raises(Disagreement, match="reports 12 consumed samples; expected 16"):
        run._count()
