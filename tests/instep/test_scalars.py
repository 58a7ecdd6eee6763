"""TensorBoard, through Megatron's own writer: what a run tells there, whoever of it is left to tell."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.instep.conftest import Runs
from tests.instep.runs import LAYOUTS, Case, Strike

pytestmark = pytest.mark.slow


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Name -> iteration -> value, of all files that the run's writers have left."""
    found: defaultdict[str, dict[int, float]] = defaultdict(dict)
    for file in sorted(folder.glob("events.out.tfevents.*")):
        events = EventAccumulator(str(file), size_guidance={"scalars": 0}).Reload()
        for name in events.Tags()["scalars"]:
            found[name].update({event.step: event.value for event in events.Scalars(name)})
    return found


def test_replicas_spares_epochs_and_recoveries_are_told_even_when_the_worker_that_tells_them_dies(
    runs: Runs, tmp_path: Path
) -> None:
    """The last rank writes: first worker 3, then worker 2, which opens a writer of its own."""
    board = tmp_path / "board"
    flags = ("--tensorboard-dir", str(board), "--tensorboard-queue-size", "1", "--tensorboard-log-interval", "1")
    case = replace(Case(LAYOUTS[0], (Strike(1, 0, 3, "backward"), Strike(3, 0, 6, "forward"))), flags=flags)
    result = runs.check(case)
    told = scalars(board)
    assert len(list(board.glob("events.out.tfevents.*"))) == 2
    replicas = {step.iteration: step.replicas for step in result.steps}
    assert told["recover/replicas"] == replicas, result.told()
    assert told["recover/spares"] == dict.fromkeys(replicas, 0)
    assert told["recover/epoch"] == {step.iteration: step.epoch for step in result.steps}
    recovered = {iteration for iteration, seconds in told["recover/recovery-seconds"].items() if seconds > 0}
    assert recovered == {3, 6}
    losses = {step.iteration: step.loss for step in result.steps}
    assert told["lm loss"] == pytest.approx({i: losses[i] for i in told["lm loss"]}, rel=1e-6)
    assert set(told["lm loss"]) == set(losses)
