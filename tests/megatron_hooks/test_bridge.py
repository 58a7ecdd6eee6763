"""Deaths in a loop with Megatron-Bridge's seams: the double of it trains, real signals kill its workers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from recover_megatron.run_log.steps import StepRecord, read_steps, violations
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
    assert "--recover with Megatron-Bridge cannot take checkpoint.async_save = True: it was not tried" in said
    assert "--recover with Megatron-Bridge cannot take model.log_max_attention_logit: it was not tried" in said
    assert "Traceback" not in said
