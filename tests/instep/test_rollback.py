"""The state of a position is lost with all who held it: the run goes back to its newest checkpoint, in place.

Workers are killed for good; those that live stay the same processes.  From the checkpoint on the run is the
failure-free one, and so are its steps.jsonl and its parameters at the end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from recover_megatron.run_log.steps import read_steps
from tests.drawn import some
from tests.instep.conftest import Runs
from tests.instep.runs import NO_EVALUATION, Case, Layout, Result, Strike
from tests.megatron_hooks.tiny import ASYNCHRONOUSLY

pytestmark = pytest.mark.slow

ADAM = tuple("--optimizer adam --lr 0.01 --min-lr 0.003 --adam-eps 1e-4 --disable-bias-linear".split())
"""As in test_sharded.py.  Megatron cannot load SGD's state from a distributed checkpoint."""
SHARDED = (*ADAM, "--use-distributed-optimizer")
TORCH = ("--ckpt-format", "torch")
TP2, DP4 = Layout("tp2-dp2", 2, tensor=2), Layout("dp4", 4)
MODEL = (*NO_EVALUATION, "--clip-grad", "0.2")
BOTH = (Strike(0, 1, 6, "backward"), Strike(1, 1, 6, "forward"))
"""All that hold the state of position 1, at once."""
ALL_BUT_ONE = (Strike(0, 0, 6, "forward"), Strike(0, 1, 6, "forward"), Strike(1, 1, 6, "forward"))


@dataclass(frozen=True)
class Scenario:
    """A loss of the state, and what it must lead to."""

    name: str
    case: Case
    replicas: int
    """That end the run."""
    flags: tuple[str, ...] = ()
    when: str = ""
    """See ``Case.patient``."""
    to: tuple[int, ...] = (4,)
    """The iterations of the checkpoint, one of which it must be: one is saved after every second."""
    said: str = ""
    """By one of those who live."""

    def __str__(self) -> str:
        return self.name


FIRST = Scenario("both holders of a position at once", Case(TP2, BOTH, 10, model=ADAM), 1)
SCENARIOS = [
    Scenario("the legacy format", Case(TP2, BOTH, 10), 1, TORCH),
    # That of iteration 4 may not be written yet, which is a matter of the disk.
    Scenario("asynchronous", Case(TP2, BOTH, 10, model=ADAM), 1, tuple(ASYNCHRONOUSLY.split()), to=(2, 4)),
    Scenario("replaced", Case(TP2, BOTH, 12, restarts=2), 2, TORCH, when="9-:2"),
    # Each replica is one worker: the others are whole, and go back all the same.
    Scenario(
        "a shard and its shadow",
        Case(DP4, (Strike(1, 0, 6, "backward"), Strike(2, 0, 6, "forward")), 10, model=SHARDED), 2,
        said="the optimizer state of workers 1 had no other copy",
    ),
    Scenario("a position with its shards", Case(TP2, BOTH, 10, model=SHARDED), 1),
    Scenario(
        "one orphan is left", Case(TP2, ALL_BUT_ONE, 10, restarts=3).altered("pacing.late"), 1, TORCH,
        said="waits up to 300 s for other workers",
    ),
    Scenario(
        "the newest cannot be read", Case(TP2, BOTH, 10).altered("faulty.spoil", 0, 6), 1, TORCH, to=(2,),
        said="cannot load the checkpoint of iteration 4 in",
    ),
    # Two are left, both needed: one dies, and a newcomer takes its part.
    *(
        Scenario(
            f"a death in the load, {visit}",
            Case(TP2, (*BOTH, Strike(0, 0, 5, "rollback", visit=visit)), 10, restarts=3), 1, TORCH,
        )
        for visit in (1, 2)
    ),
]  # fmt: skip


def gone_back(runs: Runs, scenario: Scenario) -> Result:
    """Run it with checkpoints; it must be the failure-free run, but for what was run twice, which is told."""
    case = replace(scenario.case, model=(*scenario.case.model, *MODEL))
    case = case.with_flags("--save", str(runs.out / "checkpoints"), "--save-interval", "2", *scenario.flags)
    case = case.patient(scenario.when) if scenario.when else case
    result = runs.check(case, 10.0 if "adam" in case.model else 1.0)
    assert 0 in result.ended.codes, "nobody was started in place of all"
    assert result.replicas[-1] >= scenario.replicas, result.replicas
    backs = result.of_training("rolled back")
    (to,) = {back["to"] for back in backs}
    assert to in scenario.to, result.told()
    assert f"rolled back to iteration {to} (from disk, {runs.out / 'checkpoints'})" in result.said, result.told()
    assert scenario.said in result.said, result.told()
    return result


def test_a_lost_state_is_that_of_the_newest_checkpoint(runs: Runs, tmp_path: Path) -> None:
    result = gone_back(runs, FIRST)
    (back,) = result.of_training("rolled back")
    assert (back["lost"], back["tier"]) == (1, "disk")
    assert result.replicas == [2] * 4 + [1] * 6, result.replicas
    superseded = list(read_steps(tmp_path / "steps.jsonl.1"))
    assert [step.iteration for step in superseded] == [1, 2, 3, 4, 5], "what was run twice is kept"


@pytest.mark.parametrize("scenario", some("rollbacks", SCENARIOS, 2), ids=str)
def test_it_is_however_it_was_lost(runs: Runs, scenario: Scenario) -> None:
    gone_back(runs, scenario)
