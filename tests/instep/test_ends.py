"""How a run ends that cannot go on, and how a worker ends that has only itself to blame."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from recover_megatron.membership.errors import EXIT_NO_REPLICA, EXIT_SAME_FAULT
from recover_megatron.report.steps import read_steps
from tests.drawn import EVERYTHING
from tests.forkserver import ForkServer
from tests.instep.conftest import Reference
from tests.instep.runs import LAYOUTS, SAMPLES, Case, Layout, Result, Strike, check, check_steps_until

pytestmark = pytest.mark.slow

DP4 = LAYOUTS[0]
TP2 = Layout("tp2-dp2", 2, tensor=2)
PP2 = Layout("pp2-dp2", 2, pipeline=2)
ENDS = list(itertools.product([TP2, PP2], ["forward", "agree", "recovery"]))


@pytest.mark.parametrize(
    ("layout", "phase"), ENDS if EVERYTHING else ENDS[::4], ids=lambda part: getattr(part, "name", part)
)
def test_without_a_complete_replica_the_survivors_end_with_10_and_say_what_was_lost(
    forkserver: ForkServer, reference: Reference, tmp_path: Path, layout: Layout, phase: str
) -> None:
    """Of four workers three are lost: what is left of two replicas goes on as one, until that loses a worker, too."""
    first = 8 if phase == "recovery" else 3
    case = Case(layout, (Strike(1, 1, first, "backward"), Strike(0, 0, 8, phase), Strike(0, 1, 10, "forward")), 12)
    case = case.with_flags("--save", str(tmp_path / "checkpoints"), "--save-interval", "2")
    result = case.run(forkserver, tmp_path)
    lost = [strike.worker(layout) for strike in case.strikes]
    codes = dict(enumerate(result.ended.codes))
    assert [codes.pop(worker) for worker in lost] == [-9, -9, -9], result.told()
    assert set(codes.values()) == {EXIT_NO_REPLICA}, result.told()
    check_steps_until(result, reference(case), 9)
    told = f"iteration 3: {lost[0]}; iteration 8: {lost[1]}; iteration 10: {lost[2]}"
    if phase == "recovery":
        told = f"iteration 8: {', '.join(map(str, sorted(lost[:2])))}; iteration 10: {lost[2]}"
    for worker in codes:
        said = result.log(worker)
        assert f"Workers lost: {told}; alive" in said, said
        assert f"iteration 8 in {tmp_path / 'checkpoints'}" in said, said


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
