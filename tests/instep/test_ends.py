"""How a run ends that cannot go on, and how a worker ends that has only itself to blame."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from recover_megatron.membership.errors import EXIT_NO_REPLICA, EXIT_SAME_FAULT, EXIT_STATE_LOST
from recover_megatron.report.steps import read_steps
from tests.forkserver import ForkServer
from tests.instep.cells import EVERYTHING
from tests.instep.conftest import Reference
from tests.instep.runs import LAYOUTS, SAMPLES, Case, Layout, Result, Strike, check, check_steps_until

pytestmark = pytest.mark.slow

DP4 = LAYOUTS[0]
TP2 = Layout("tp2-dp2", 2, tensor=2)
PP2 = Layout("pp2-dp2", 2, pipeline=2)
ENDS = list(itertools.product([TP2, PP2, LAYOUTS[-1]], ["forward", "agree", "recovery"]))


def check_end(result: Result, reference: Reference, code: int, told: str) -> None:
    """All survivors end with ``code``, after iteration 4, and say who was lost and what the last checkpoint is."""
    lost = [strike.worker(result.case.layout) for strike in result.case.strikes]
    codes = dict(enumerate(result.ended.codes))
    assert {codes.pop(worker) for worker in lost} == {-9}, result.told()
    assert set(codes.values()) == {code}, result.told()
    check_steps_until(result, reference(result.case), 4)
    for worker in codes:
        said = result.log(worker)
        assert f"Workers lost: {told}; alive" in said, said
        assert f"iteration 4 in {result.out / 'checkpoints'}" in said, said


def saving(case: Case, out: Path) -> Case:
    return case.with_flags("--save", str(out / "checkpoints"), "--save-interval", "2")


@pytest.mark.parametrize(
    ("layout", "phase"), ENDS if EVERYTHING else ENDS[::4], ids=lambda part: getattr(part, "name", part)
)
def test_when_a_position_is_lost_everywhere_the_survivors_end_with_12_and_say_what_was_lost(
    forkserver: ForkServer, reference: Reference, tmp_path: Path, layout: Layout, phase: str
) -> None:
    """Of all others there are enough for a replica."""
    last = layout.positions - 1
    first = 5 if phase == "recovery" else 3
    case = saving(Case(layout, (Strike(1, last, first, "backward"), Strike(0, last, 5, phase))), tmp_path)
    lost = [strike.worker(layout) for strike in case.strikes]
    told = f"iteration 3: {lost[0]}; iteration 5: {lost[1]}"
    if phase == "recovery":
        told = f"iteration 5: {', '.join(map(str, sorted(lost)))}"
    check_end(case.run(forkserver, tmp_path), reference, EXIT_STATE_LOST, told)


def test_when_too_few_for_a_replica_live_the_survivors_end_with_10_and_say_who_was_lost(
    forkserver: ForkServer, reference: Reference, tmp_path: Path
) -> None:
    strikes = (Strike(1, 0, 3, "forward"), Strike(1, 1, 3, "forward"), Strike(0, 0, 5, "backward"))
    case = saving(Case(TP2, strikes), tmp_path)
    first, second, third = (strike.worker(TP2) for strike in strikes)
    told = f"iteration 3: {first}, {second}; iteration 5: {third}"
    check_end(case.run(forkserver, tmp_path), reference, EXIT_NO_REPLICA, told)


@pytest.mark.parametrize("layout", [DP4, PP2], ids=lambda layout: layout.name)
def test_an_exception_of_one_worker_is_told_with_its_traceback_and_the_run_goes_on(
    forkserver: ForkServer, reference: Reference, tmp_path: Path, layout: Layout
) -> None:
    case = Case(layout, (Strike(1, 0, 3, "forward", "raise", 2),))
    result = case.run(forkserver, tmp_path)
    check(result, reference(case))
    worker = case.strikes[0].worker(layout)
    assert "InjectedFault: injected fault" in result.log(worker)
    assert "Traceback" in result.log(worker)
    told = [event for event in result.events if event["event"] == "exception"]
    assert len(told) == 1
    assert (told[0]["worker"], told[0]["iteration"]) == (worker, 3)
    assert "InjectedFault" in str(told[0]["error"])
    assert "Traceback" in str(told[0]["traceback"])
    for other in set(range(layout.grid.world)) - {worker}:
        assert "InjectedFault" not in result.log(other)


ROTTEN = 2 * SAMPLES + 5
"""A sample of iteration 3: microbatch 5."""


@pytest.mark.parametrize(("what", "loading"), [("raise", 0), ("raise", 1), ("nan", 0)])
def test_a_sample_that_no_worker_survives_ends_the_run_with_its_cause(
    forkserver: ForkServer, reference: Reference, tmp_path: Path, what: str, loading: int
) -> None:
    """``loading``: processes of the data loader; in one the error has another text than on the spot."""
    case = Case(DP4).with_flags("--num-workers", str(loading))
    argv = [str(Path(__file__).with_name("poison.py")), what, str(ROTTEN), *case.argv(tmp_path)[1:]]
    result = Result(case, forkserver.run(4, argv, tmp_path, training=tmp_path / "training"), tmp_path)
    assert result.ended.codes == [EXIT_SAME_FAULT] * 4, result.told()
    said = [result.log(worker) for worker in range(4)]
    error = "sample 29 is rotten" if what == "raise" else "found NaN in local forward loss calculation"
    victims = [worker for worker in range(4) if "ends by an exception of its own" in said[worker]]
    assert 2 <= len(victims) <= 3, result.told()
    for worker in victims:
        assert error in said[worker]
    cause = re.compile(r"microbatch 5 of iteration 3 raises .*" + error)
    for worker in set(range(4)) - set(victims):
        assert cause.search(said[worker]), said[worker]
    assert [step.iteration for step in read_steps(tmp_path / "steps.jsonl")] == [1, 2]
    check_steps_until(result, reference(Case(DP4)), 2)
