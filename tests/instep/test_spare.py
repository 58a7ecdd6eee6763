"""Spares and orphans, with sessions that are played: what they ask for, how long they may take, who is put aside."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from recover_megatron.collectives.epoch import PeerLost
from recover_megatron.instep.decision import Decision, JoinStatus
from recover_megatron.instep.faults import OtherPosition, RunOver
from recover_megatron.instep.hooks import FIRST_SECONDS, ProgressReports
from recover_megatron.instep.meeting.assignment import Assignment
from recover_megatron.instep.meeting.orphan import Orphan
from recover_megatron.instep.meeting.spare import BUILD_SECONDS, STUCK_SECONDS, Mirror, Spare
from recover_megatron.instep.recovery import Recovery
from recover_megatron.megatron_hooks.loop.untaken_places import MOST, PAUSE_SECONDS, UntakenPlaces
from recover_megatron.membership.records import EXIT_NO_REPLICA, CoordinatorLost, EpochRevoked
from recover_megatron.workload.grid import launch_grid
from tests.harness.waiting import DEADLINE

FRESH = Decision(5, {0: (0, 1), 1: (2, 3)}, (4,), at=7, fresh=(1,), version=6, holders={2: (0,), 3: (1,)})


class Session:
    """Epoch 5 is there; what the spare does is noted in ``said``."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.left = frozenset[int]()
        self.idled, self.waited, self.asked = threading.Event(), threading.Event(), threading.Event()
        self.settled = threading.Event()
        self.over = False

    def idle(self, vacant: bool) -> None:
        self.idled.set()

    def leave(self) -> None:
        self.said.append("leave")

    def wait_revoked(self, timeout: float | None = None) -> bool:
        assert self.asked.wait(DEADLINE)
        raise CoordinatorLost("the end of the test", 0)

    def wait_committed(self, iteration: int, epoch: int) -> None:
        self.said.append(f"wait for {iteration} in {epoch}")
        self.waited.set()
        assert self.settled.wait(DEADLINE)
        if self.over:
            raise EpochRevoked(epoch)

    def ask(self, reason: str) -> None:
        self.said.append("ask")
        self.asked.set()


def planner_of(*decisions: Decision, finished: bool = False, whole: bool = True) -> Any:
    """Its epochs decide this, one after the other."""
    plans = iter(decisions)
    return SimpleNamespace(
        timeline=(0, 0),
        node="a",
        finished=finished,
        meet=lambda status, reason: (next(plans), None),
        give_up_unless_enough=lambda decision: None,
        has_all_replicas=lambda decision: whole,
        status=lambda at: JoinStatus(0, position=0, at=at),
    )


def spare_of(session: Any, planner: Any) -> Spare:
    """Worker 4, whose thread runs."""
    spare = Spare(planner, session, 4, JoinStatus(None, position=0))
    spare.start()
    return spare


def end_of(outcome: object) -> tuple[int, str]:
    """The code and the reason of the end of the run for this worker, which ``outcome`` must be."""
    assert isinstance(outcome, RunOver)
    return outcome.code, str(outcome)


@pytest.mark.parametrize("revoked", [False, True])
def test_news_are_told_when_the_first_step_of_the_fresh_replicas_is_over(revoked: bool) -> None:
    session = Session()
    session.over = revoked
    spare = spare_of(session, planner_of(FRESH, whole=False))
    assert session.idled.wait(DEADLINE)
    outcomes: list[Any] = []
    main = threading.Thread(target=lambda: outcomes.append(spare.arrive(version=6)))
    main.start()
    assert session.waited.wait(DEADLINE)
    assert session.said == ["wait for 7 in 5"], "not asked yet: it would end the epoch in which states are given"
    session.settled.set()
    main.join(DEADLINE)
    assert session.said == ["wait for 7 in 5", "ask"]
    assert [*map(end_of, outcomes)] == [(0, "the end of the test")]


def test_who_is_ready_while_all_places_are_taken_asks_for_no_epoch() -> None:
    session = Session()
    spare = spare_of(session, planner_of(FRESH))
    assert session.idled.wait(DEADLINE)
    session.asked.set()  # the run ends
    assert end_of(spare.arrive(version=None)) == (0, "the end of the test")
    assert session.said == []


@pytest.mark.parametrize("finished", [False, True])
def test_no_whole_replica_is_the_end_of_the_run_only_where_somebody_had_finished(finished: bool) -> None:
    """Not where others have left since their node was drained: new replicas may come of it, or a checkpoint."""
    session = Session()
    session.left = frozenset({2, 3})
    session.asked.set()  # the run ends
    spare = spare_of(session, planner_of(Decision(6, {}, (0, 4), at=8), finished=finished, whole=False))
    assert end_of(spare.arrive(version=None)) == (0, "the training is over" if finished else "the end of the test")
    assert session.idled.is_set() is not finished


class Epochs:
    """A session whose epochs end when the test says so.  ``waits``: how long each is waited for at most."""

    settings = SimpleNamespace(hang_timeout=1.0)
    aside = frozenset[int]()

    def __init__(self) -> None:
        self.waits: queue.Queue[float | None] = queue.Queue()
        self.ends: queue.Queue[bool | None] = queue.Queue()
        """True: the epoch is over; False: the wait; None: the run."""

    def wait_revoked(self, timeout: float | None = None) -> bool:
        self.waits.put(timeout)
        if (end := self.ends.get(timeout=DEADLINE)) is None:
            raise CoordinatorLost("the end of the test", 0)
        return end

    def idle(self, vacant: bool) -> None:
        """Nobody asks."""

    mark = show = ask = lambda self, *args: None


def test_who_keeps_the_state_of_the_last_replica_does_so_as_long_as_the_epoch_lasts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The main thread is in a mirror's work all the while: it does not count as stuck, however long that takes."""
    session = Epochs()
    last = Decision(5, {0: (0, 1)}, (4,), at=7, mirrors={4: 0})
    without = Decision(6, {0: (0, 1)}, (4,), at=8)
    spare = Spare(planner_of(last, without), session, 4, JoinStatus(None, position=0))
    arriving: queue.Queue[Any] = queue.Queue()
    threading.Thread(target=lambda: arriving.put(spare.arrive(version=6)), daemon=True).start()
    spare.start()
    assert arriving.get(timeout=DEADLINE) == Mirror(last)
    assert session.waits.get(timeout=DEADLINE) is None
    session.ends.put(True)  # the epoch is over, and with it the mirror's work: it is to arrive as an orphan is
    assert 0 < (session.waits.get(timeout=DEADLINE) or 0) <= STUCK_SECONDS
    monkeypatch.setattr("recover_megatron.instep.meeting.spare.LINGER_SECONDS", DEADLINE)
    session.ends.put(False)
    wait_until(spare, lambda: spare._outcome is not None)
    stuck = spare.arrive(version=6)
    assert end_of(stuck)[0] == 1


def test_who_builds_a_model_may_take_longer_than_who_leaves_the_training() -> None:
    session = Epochs()
    asked = Decision(5, {0: (0, 1)}, (4,), at=7, rebuild={4: 1})
    spare = spare_of(session, planner_of(asked, asked))
    assert 0 < (session.waits.get(timeout=DEADLINE) or 0) <= STUCK_SECONDS, "it leaves the training"
    arriving: queue.Queue[Any] = queue.Queue()
    threading.Thread(target=lambda: arriving.put(spare.arrive(version=6)), daemon=True).start()
    wait_until(spare, lambda: spare._here)
    session.ends.put(True)
    wanted = arriving.get(timeout=DEADLINE)
    assert isinstance(wanted, OtherPosition)
    assert wanted.position == 1
    assert STUCK_SECONDS < (session.waits.get(timeout=DEADLINE) or 0) <= BUILD_SECONDS
    session.ends.put(None)
    assert isinstance(spare.arrive(), RunOver)


def test_an_epoch_does_not_wait_for_the_main_thread_of_a_spare_that_builds_a_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("recover_megatron.instep.meeting.spare.GRACE_SECONDS", 100 * DEADLINE)
    session, joined = Epochs(), queue.Queue[JoinStatus]()
    asked = Decision(5, {0: (0, 1)}, (4,), at=7, rebuild={4: 1})
    planner = planner_of()
    planner.meet = lambda status, reason: (joined.put(status), (asked, None))[1]
    spare = Spare(planner, session, 4, JoinStatus(None, position=0))  # type: ignore[arg-type]
    arriving: queue.Queue[Any] = queue.Queue()
    threading.Thread(target=lambda: arriving.put(spare.arrive(version=6)), daemon=True).start()
    spare.start()
    assert isinstance(arriving.get(timeout=DEADLINE), OtherPosition)
    assert joined.get(timeout=DEADLINE).ready
    session.ends.put(True)  # another worker dies while the model is built, which takes as long as the test
    again = joined.get(timeout=DEADLINE)
    assert (again.building, again.ready) == (True, False)
    session.ends.put(None)
    assert isinstance(spare.arrive(), RunOver)


def wait_until(spare: Spare, done: Callable[[], bool]) -> None:
    """Until its thread, or its main one, has come so far."""
    with spare._changed:
        assert spare._changed.wait_for(done, DEADLINE)


@pytest.mark.parametrize("allowed", [0.0, 600.0])
def test_an_orphan_may_take_as_long_to_leave_as_its_last_mark_allows(allowed: float) -> None:
    """It compiles, or waits for storage: the run would have waited for it as long, had its replica not broken."""
    session, mine = Epochs(), SimpleNamespace(lock=threading.RLock(), me=4)
    progress = SimpleNamespace(at=3, allowed=allowed)
    planner = planner_of(Decision(5, {0: (0, 1)}, (4,), at=7))
    orphan = Orphan(session, None, progress, mine, planner, None, None, at_launch=True)
    orphan._be_spare("its replica is broken")
    assert allowed < (session.waits.get(timeout=DEADLINE) or 0) <= STUCK_SECONDS + allowed
    session.ends.put(None)
    assert orphan._spare is not None
    assert isinstance(orphan._spare.arrive(), RunOver)


def test_a_death_before_the_first_plan_ends_who_waits_for_it_with_a_code_that_is_requeued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def end(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr("recover_megatron.instep.meeting.orphan.os._exit", end)
    session: Any = SimpleNamespace(plan=None, dead={1}, opened_members={0})
    mine: Any = SimpleNamespace(present=lambda: (None, False))
    others: Any = SimpleNamespace(why="", opened=lambda epoch, workers: None)
    orphan = Orphan(session, HOOKS, others, mine, others, others, others, at_launch=True)
    with pytest.raises(SystemExit, match=f"^{EXIT_NO_REPLICA}$"):
        orphan.revoked(1, "worker 1 died")
    session.plan = object()
    orphan.revoked(2, "worker 1 died")  # this worker's main thread is about to take up the first plan


def test_a_worker_that_has_finished_is_no_orphan_when_its_mate_leaves_before_it() -> None:
    """Else it would end all communication of its replica, and wait for another place, in a run that is over."""
    did: list[str] = []
    groups: Any = SimpleNamespace(end=lambda reason: None, close=lambda: did.append("close"))
    mine: Any = SimpleNamespace(
        me=0, lock=threading.RLock(), lost_mates=[1], epoch_groups=groups, present=lambda: (groups, True)
    )
    session: Any = SimpleNamespace(epoch=5, revoked=False, plan=object(), opened_members={0})
    others: Any = SimpleNamespace(why="", opened=lambda epoch, workers: None)
    orphan = Orphan(session, HOOKS, others, mine, others, others, others, at_launch=True)
    orphan.leave = lambda note: did.append(note)  # type: ignore[method-assign]

    def leave() -> None:
        """The news of the mate comes before this worker has left, too."""
        session.revoked = True
        orphan.revoked(6, "worker 1 has left")
        did.append("leave")

    session.leave = leave
    sections = SimpleNamespace(run=lambda kind, work: did.append(kind))
    recovery: Any = SimpleNamespace(sections=sections, orphan=orphan, assignment=mine, session=session)
    Recovery.finish(recovery)
    assert did == ["end", "close", "leave"]
    orphan.finished = False
    orphan.revoked(6, "worker 1 has left")
    assert did[3:] == ["worker 1 of its replica is lost"], "as before the end of the training"


class ComparedStatus:
    """In place of the session: the seconds that were allowed beyond the hang timeout, mark by mark."""

    def __init__(self) -> None:
        self.allowed: list[float] = []
        self.revoked, self.epoch = False, 3

    def mark(self, iteration: int, phase: str, microbatch: Any, waiting: bool, allow: float) -> None:
        self.allowed.append(allow)

    def agree(self, number: int) -> None:
        """All agree at once."""


HOOKS: Any = SimpleNamespace(iteration=lambda: 1, inject=lambda phase, iteration: None)


@pytest.mark.parametrize(("mates", "allowed"), [((1, 4), FIRST_SECONDS), ((1, 2), 0.0)])
def test_mates_of_a_newcomer_may_wait_until_its_kernels_are_compiled(mates: tuple[int, ...], allowed: float) -> None:
    """Worker 1 has trained for long; the newcomer, worker 4 of a run of four, compiles in its first step."""
    session: Any = ComparedStatus()
    progress = ProgressReports(session, HOOKS)
    progress.agree(1)
    grid = launch_grid(4, tensor=2, context=1, pipeline=1, inner_ranks=1)
    comm_config: Any = None
    mine = Assignment(session, 1, grid, comm_config)
    decision: Any = SimpleNamespace(
        epoch=3, at=7, grid={0: mates}, place=lambda me: (0, 0), peer_stores_by_slot=lambda grid: {}
    )
    nothing: Any = SimpleNamespace(close_repeats=lambda: None)
    orphan = Orphan(session, HOOKS, progress, mine, nothing, nothing, nothing, at_launch=True)
    mine.take_up = lambda given: (mine.stand(0, 0), setattr(mine, "taken_up", given))  # type: ignore[method-assign, assignment]
    orphan.come_back(decision)
    progress.mark("forward")
    progress.agree(7)
    progress.mark("forward")
    assert session.allowed[-3:] == [allowed, allowed, 0.0]


BESIDE = Decision(5, {0: (0, 1), 1: (2, 3)}, (), fresh=(1,))
ALL_NEW = Decision(5, {1: (2, 3)}, (), fresh=(1,))


def pauses(*errors: Exception, decision: Decision = BESIDE) -> list[float]:
    """Before each further offer; -1: there is none."""
    untaken = UntakenPlaces()
    found = []
    for error in errors:
        untaken.failed(error, decision)
        found.append(-1.0 if untaken.retired else untaken.pause)
    return found


def test_the_same_failure_three_times_in_a_row_is_enough_whatever_its_numbers() -> None:
    lost = [PeerLost(f"{number} of gloo's connections were lost") for number in (1, 8, 3)]
    assert pauses(*lost) == [0.0, PAUSE_SECONDS, -1.0]
    assert pauses(lost[0], lost[1], TimeoutError("nobody came"), lost[2]) == [0.0, PAUSE_SECONDS, 0.0, 0.0]


def test_what_ends_by_another_or_where_the_run_is_at_stake_counts_for_nothing() -> None:
    lost = PeerLost("it is gone")
    assert pauses(*[EpochRevoked(5)] * 4) == [0.0] * 4
    assert pauses(*[lost] * 4, decision=ALL_NEW) == [0.0] * 4
    assert pauses(lost, EpochRevoked(5), lost, EpochRevoked(5), lost)[-1] == -1.0
    untaken = UntakenPlaces()
    for _ in range(MOST - 1):
        untaken.failed(lost, BESIDE)
    untaken.taken()
    untaken.failed(lost, BESIDE)
    assert not untaken.retired
