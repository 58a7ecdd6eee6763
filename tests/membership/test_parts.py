"""The pure parts: who hangs, who may go on, who holds the lease."""

from __future__ import annotations

import contextlib
import json
import math
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from cluster import cluster
from hypothesis import given
from hypothesis import strategies as st
from simulation import SETTINGS, attach
from test_wire import nested

from recover_megatron.membership import CoordinatorLost, MembershipError, Session
from recover_megatron.membership.coordinator import Coordinator
from recover_megatron.membership.detect import Judgement, WorkerProgress, apart, judge
from recover_megatron.membership.events import (
    Accepted,
    AskForLease,
    Challenged,
    Dial,
    Log,
    Lost,
    Received,
    Settle,
    State,
    Tick,
    Verdict,
)
from recover_megatron.membership.io.lease import Lease
from recover_megatron.membership.leadership import Permission, may_go_on, permission
from recover_megatron.membership.messages import to_member
from recover_megatron.membership.messages.fields import Message, Presented
from recover_megatron.membership.messages.to_coordinator import (
    AttachNodeAgent,
    Complain,
    Ended,
    Heard,
    Join,
    ToCoordinator,
)
from recover_megatron.membership.records import Formed, Presentation, Settings
from recover_megatron.membership.sides.member import Member
from recover_megatron.membership.wire import TO_COORDINATOR, Secret, read_secret_file
from recover_megatron.network import messages as wire
from recover_megatron.network.connection import nonce
from tests.harness.waiting import DEADLINE

SETS = st.frozensets(st.integers(0, 5))


def judged(now: float, *group: WorkerProgress, fresh: float = -math.inf) -> Judgement:
    return judge(group, now, hang_timeout=10.0, fresh=fresh)


def test_a_worker_that_nobody_waits_for_does_not_hang() -> None:
    assert judged(100.0, WorkerProgress(0, marked=0.0), WorkerProgress(1, marked=99.0)).hung == []


def test_stopped_workers_whose_mates_cannot_say_that_they_wait_are_seen_when_nobody_makes_a_mark() -> None:
    group = [WorkerProgress(0, marked=5.0, heard=99.0), WorkerProgress(1, marked=5.0, heard=4.0)]
    assert judged(14.0, *group) == Judgement()
    assert judged(100.0, *group) == Judgement([1])
    assert judged(100.0, *group, fresh=95.0) == Judgement()
    assert judged(100.0, *group, WorkerProgress(2, marked=95.0, heard=99.0)) == Judgement()


def test_a_worker_without_a_mark_while_another_waits_for_it_hangs() -> None:
    waiting = WorkerProgress(0, marked=50.0, waiting_since=50.0)
    assert judged(59.0, waiting, WorkerProgress(1, marked=0.0)).hung == []
    assert judged(61.0, waiting, WorkerProgress(1, marked=0.0)).hung == [1]
    assert judged(61.0, waiting, WorkerProgress(1, marked=55.0)).hung == []


def test_a_declared_long_phase_is_no_hang_until_it_is_over() -> None:
    group = [WorkerProgress(0, waiting_since=0.0), WorkerProgress(1, allow=100.0)]
    assert judged(105.0, *group).hung == []
    assert judged(111.0, *group).hung == [1]


def test_what_a_mark_allows_holds_only_while_the_worker_is_heard() -> None:
    waiting = WorkerProgress(0, waiting_since=0.0)
    stopped = WorkerProgress(1, allow=1000.0, heard=1.0)
    assert judged(100.0, waiting, WorkerProgress(1, allow=1000.0, heard=99.0)).hung == []
    assert judged(100.0, waiting, stopped).hung == [1]
    assert judged(9.0, waiting, stopped).hung == []


def test_when_all_wait_for_each_other_nobody_is_blamed() -> None:
    assert judged(12.0, *(WorkerProgress(n, waiting_since=1.0) for n in range(3))) == Judgement(stuck=True)


def waits(worker: int, phase: str, position: int = 0, iteration: int = 7) -> WorkerProgress:
    return WorkerProgress(
        worker, waiting_since=1.0, waits=True, iteration=iteration, phase=phase, place=[0, position, 1]
    )


def kinds(*phases: str) -> frozenset[int]:
    """Who is apart of workers that wait in these, each of which is a replica."""
    return apart([waits(number, phase) for number, phase in enumerate(phases)], {n: n for n in range(len(phases))})


def test_who_waits_in_something_that_most_replicas_do_not_come_to_is_apart() -> None:
    assert kinds("reduce-scatter", "barrier", "reduce-scatter") == {1}
    assert kinds("barrier", "reduce-scatter", "barrier") == {1}
    assert kinds("reduce-scatter", "reduce-scatter") == frozenset()
    assert apart([waits(0, "agree"), waits(1, "agree", iteration=8), waits(2, "agree")], {0: 0, 1: 1, 2: 2}) == {1}


def test_of_two_replicas_the_one_is_apart_that_has_reported_the_step_or_is_in_none() -> None:
    assert kinds("barrier", "reduce-scatter") == kinds("barrier", "agree") == {0}
    assert kinds("reduce-scatter", "agree") == {1}


def test_nobody_is_apart_where_more_than_half_of_the_replicas_differ() -> None:
    assert kinds("reduce-scatter", "barrier", "evaluation") == frozenset()
    assert apart([], {}) == frozenset()


def test_stages_that_wait_in_different_operations_are_not_apart_and_of_a_replica_that_is_only_who_differs() -> None:
    replica_of = {number: number // 2 for number in range(6)}
    usual = ["agree", "reduce-scatter"] * 3
    group = [waits(number, phase, number % 2) for number, phase in enumerate(usual)]
    assert apart(group, replica_of) == frozenset()
    assert apart([*group[:2], waits(2, "barrier"), *group[3:]], replica_of) == {2}
    assert apart([*group, waits(6, "barrier")], replica_of) == frozenset(), "it is in no whole replica"


def test_what_a_wait_allows_is_for_a_worker_that_does_not_wait() -> None:
    """In a rendezvous: one that waits in an operation for those that have joined gets them never."""
    come = [WorkerProgress(n, marked=1.0, waiting_since=1.0) for n in (0, 2)]
    away, computes = WorkerProgress(1, allow=600.0, waits=True), WorkerProgress(3, allow=600.0)
    assert judged(12.0, *come, away).hung == [1]
    assert judged(10.0, *come, away) == Judgement()
    assert judged(100.0, *come, away, computes) == Judgement()


def test_where_most_wait_in_an_operation_nobody_is_hung_before_what_their_marks_allow_is_over() -> None:
    """They may open the first communicators of a large run, and those that have joined are healthy."""
    come = WorkerProgress(1, marked=1.0, waiting_since=1.0)
    away = [WorkerProgress(n, marked=8.0, allow=600.0, waits=True) for n in (0, 2)]
    assert judged(100.0, come, *away) == Judgement()
    assert judged(700.0, come, *away).hung == [0, 2]


@given(SETS, SETS, SETS)
def test_the_side_that_formed_the_epoch_and_another_side_never_both_go_on(
    members: frozenset[int], old_side: frozenset[int], gone: frozenset[int]
) -> None:
    ours = (members & old_side) - gone
    theirs = members - old_side - gone
    if ours and theirs:
        assert not (may_go_on(ours, [members], gone, own=True) and may_go_on(theirs, [members], gone, own=False))


@given(SETS, SETS)
def test_whoever_is_left_alone_by_the_dead_goes_on(members: frozenset[int], gone: frozenset[int]) -> None:
    if members - gone:
        assert may_go_on(members - gone, [members], gone, own=False)


@given(SETS, SETS, SETS, st.integers(0, 3))
def test_with_a_lease_two_sides_never_both_have_enough_and_a_claim(
    base: frozenset[int], side: frozenset[int], gone: frozenset[int], slack: int
) -> None:
    ours, theirs = (base & side) - gone, base - side - gone
    if ours and theirs:
        both = {permission(ours, [base], gone, slack), permission(theirs, [base], gone, slack)}
        assert both in ({Permission.ENOUGH, Permission.TOO_FEW}, {Permission.CLAIM})


@given(SETS, SETS, SETS, SETS, st.integers(0, 3))
def test_what_the_other_side_knows_of_the_dead_gives_it_no_claim_beside_those_that_go_on(
    base: frozenset[int], side: frozenset[int], gone: frozenset[int], more: frozenset[int], slack: int
) -> None:
    """``more``: deaths of its own that only the other side knows."""
    ours, theirs = (base & side) - gone, base - side - gone
    if ours and theirs - more and permission(ours, [base], gone, slack) is Permission.ENOUGH:
        assert permission(theirs - more, [base], gone | (more & theirs), slack) is Permission.TOO_FEW


def test_either_of_two_nodes_that_has_a_worker_left_may_claim_where_the_slack_is_a_node_s_workers() -> None:
    base, slack = frozenset(range(16)), 7
    for left in range(1, 9):
        first, second = frozenset(range(left)), frozenset(range(8, 16))
        assert permission(first, [first | second], frozenset(), slack) is Permission.CLAIM
        assert permission(second, [first | second], frozenset(), slack) in (Permission.CLAIM, Permission.ENOUGH)
    three = base | frozenset(range(16, 24))
    assert permission(base, [three], frozenset(), slack) is Permission.ENOUGH
    assert permission(frozenset(range(8)), [three], frozenset(), slack) is Permission.TOO_FEW


def claim(term: int, *members: int, epoch: int = 2, renew: bool = False) -> AskForLease:
    return AskForLease(term, epoch, frozenset(members), renew)


def test_the_lease_passes_to_a_later_term_with_one_of_its_members_alone(tmp_path: Path) -> None:
    verdicts: queue.Queue[Verdict] = queue.Queue()
    first, second = (Lease(tmp_path / "lease", verdicts.put) for _ in range(2))

    def granted(lease: Lease, wanted: AskForLease) -> bool | None:
        lease.ask(wanted)
        verdict = verdicts.get(timeout=DEADLINE)
        assert (verdict.term, verdict.epoch) == (wanted.term, wanted.epoch)
        assert verdict.granted is not False or "lease." in verdict.reason
        return verdict.granted

    assert granted(first, claim(5, 0, 1))
    assert granted(first, claim(5, 0, 1))  # it has it
    assert granted(second, claim(6, 2, 3)) is False  # it was left out
    assert granted(second, claim(4, 1, 2)) is False  # what 1 follows now is a later term
    assert granted(second, claim(7, 1))
    assert granted(first, claim(5, 0, epoch=3)) is False
    assert len(list(tmp_path.iterdir())) == 2
    first.close()
    second.close()


def test_an_epoch_takes_the_lease_early_only_for_newcomers_and_if_anybody_has_had_it(tmp_path: Path) -> None:
    verdicts: queue.Queue[Verdict] = queue.Queue()
    lease = Lease(tmp_path / "lease", verdicts.put)

    def told(wanted: AskForLease) -> tuple[bool | None, int]:
        lease.ask(wanted)
        return verdicts.get(timeout=DEADLINE).granted, len(list(tmp_path.iterdir()))

    assert told(claim(5, 0, 1, renew=True)) == (True, 0)
    assert told(claim(5, 0, 1)) == (True, 1)
    assert told(claim(5, 0, epoch=3, renew=True)) == (True, 1)
    assert told(claim(5, 0, 7, epoch=4, renew=True)) == (True, 2)
    assert told(claim(6, 8, 9, epoch=5, renew=True)) == (False, 2)  # it was left out
    assert told(claim(6, 7, epoch=5)) == (True, 3)
    lease.close()


def test_of_many_that_ask_at_once_one_gets_the_lease(tmp_path: Path) -> None:
    verdicts: queue.Queue[Verdict] = queue.Queue()
    leases = [Lease(tmp_path / "lease", verdicts.put) for _ in range(16)]
    for number, lease in enumerate(leases):
        lease.ask(claim(number, number))
    told = [verdicts.get(timeout=DEADLINE) for _ in leases]
    (winner,) = [verdict.term for verdict in told if verdict.granted]
    assert json.loads((tmp_path / "lease.1").read_text())["members"] == [[winner, winner]]
    assert [path.name for path in tmp_path.iterdir()] == ["lease.1"]
    for lease in leases:
        lease.close()


@pytest.mark.parametrize("trouble", ["no folder", "garbage"])
def test_a_lease_whose_storage_fails_is_asked_for_until_it_answers(tmp_path: Path, trouble: str) -> None:
    verdicts: queue.Queue[Verdict] = queue.Queue()
    folder = tmp_path / "folder"
    if trouble == "garbage":
        folder.mkdir()
        (folder / "lease.1").write_text('{"term": 3')
    lease = Lease(folder / "lease", verdicts.put)
    lease.ask(claim(1, 0))
    for _ in range(2):
        verdict = verdicts.get(timeout=DEADLINE)
        assert verdict.granted is None
        assert str(folder) in verdict.reason
    folder.mkdir(exist_ok=True)
    (folder / "lease.1").unlink(missing_ok=True)
    while verdict.granted is None:
        verdict = verdicts.get(timeout=DEADLINE)
    assert verdict.granted
    lease.close()


def test_an_error_in_a_callback_ends_the_waits_instead_of_letting_them_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)  # it is printed, as any thread's
    with cluster(tmp_path) as run:
        run.start_coordinators(1)

        def broken(epoch: int, reason: str) -> None:
            raise RuntimeError("a bug")

        session = Session.connect(run.addresses, 0, read_secret_file(run.secret_file), on_revoke=broken)

        def wait() -> None:
            session.join({})
            session.wait_committed(1)

        with pytest.raises(MembershipError, match="thread has failed"):
            wait()


def test_a_worker_whose_plan_was_altered_decides_from_no_other_plan_than_the_others(tmp_path: Path) -> None:
    """The worker refuses the changes to that plan, connects again, and gets the next plan whole."""
    with cluster(tmp_path) as run:
        run.start_coordinators(2)
        secret = read_secret_file(run.secret_file)
        first, second = (Session.connect(run.addresses, number, secret) for number in range(2))
        joiner, plans = beside(lambda: second.join({"own": 1}))
        first.join({"own": 0})
        joiner.join(DEADLINE)
        plans[0].data["statuses"]["0"]["own"] = "altered"
        joiner, plans = beside(lambda: second.join({"own": 1}))
        changes = first.join({"own": 0}, "the plan shall change")
        assert first.wait_revoked(DEADLINE)
        whole = first.join({"own": 0})
        joiner.join(DEADLINE)
        assert [plan.epoch for plan in plans] == [whole.epoch] == [changes.epoch + 1]
        assert plans[0].data == whole.data == changes.data
        for session in (first, second):
            session.leave()


class ByHand:
    """A coordinator of one worker, whose messages the test writes."""

    def __init__(self, listener: socket.socket, secret: Secret, members: list[list[int]]) -> None:
        self._common = {"term": 1 << 32, "members": members, "committed": 0}
        self.sock, _ = listener.accept()
        self.sock.settimeout(DEADLINE)
        self.decoder = wire.Decoder()
        challenge = nonce()
        self.say(wire.Challenge(wire.PROTOCOL_VERSION, challenge))
        proof = secret.accept(challenge, self.hear(wire.Auth, wire.AUTH))
        assert proof is not None
        self.say(proof)

    def say(self, *messages: Message) -> None:
        """All at once."""
        self.sock.sendall(b"".join(wire.encode(message) for message in messages))

    def hear[M: Message](self, kind: type[M], stage: wire.Schema[Any] = TO_COORDINATOR) -> M:
        while True:
            while (message := self.decoder.message(stage)) is None:
                self.decoder.feed(self.sock.recv(1 << 16))
            if isinstance(message, kind):
                return message

    def revoke(self, epoch: int, dead: Sequence[list[int]] = (), **more: Any) -> to_member.Revoke:
        return to_member.Revoke(epoch, dead=list(dead), left=[], reason="a test", **{**self._common, **more})

    def plan(self, epoch: int) -> to_member.Plan:
        return to_member.Plan(epoch, **self._common)

    def stop(self, epoch: int) -> ByHand:
        self.say(to_member.Stop("the test is over", 0, epoch))
        return self


@contextlib.contextmanager
def by_hand(members: list[list[int]], **options: Any) -> Iterator[tuple[Session, ByHand]]:
    """A worker's session, and its coordinator."""
    secret = Secret(b"x" * 32)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        session = Session.connect([listener.getsockname()[:2]], 0, secret, **options)
        coordinator = ByHand(listener, secret, members)
        yield session, coordinator
        coordinator.sock.close()


def beside(call: Callable[[], object]) -> tuple[threading.Thread, list[Any]]:
    """A thread that makes the call, and what it returns, once it has."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    return thread, found


@pytest.mark.parametrize(("left", "told"), [([2], []), ([], [2])])
def test_a_candidate_that_does_not_lead_takes_no_worker_that_ended_in_order_for_dead_before_it_knows(
    left: list[int], told: list[int]
) -> None:
    """The launcher has turned to it when the workers of a run that is led elsewhere end; then the leader is lost."""
    candidate = Coordinator(3, Settings(), salt=7)
    agent = AttachNodeAgent("n", "0" * 32, Presented.of(Presentation()), running=[[0, 2]])

    def faults(session: int, *messages: ToCoordinator) -> list[int]:
        effects = [e for message in messages for e in candidate.handle(Received(session, message), 1.0)]
        effects += candidate.handle(Settle(), 1.0)
        return [e.record["worker"] for e in effects if isinstance(e, Log) and e.record["event"] == "fault"]

    assert faults(1, agent, Ended(2, "exit code 0")) == []
    knows = Presentation(term=5, formed=Formed(1, frozenset(range(3)), 5), left=frozenset(left))
    workers = [attach(n, n, node_agent="n", done=3, presentation=Presented.of(knows)) for n in range(2)]
    assert faults(2, workers[0]) == []
    assert faults(3, workers[1]) == told
    assert candidate.state is State.RENDEZVOUS
    assert candidate.roster.gone == {2}


def test_a_member_waits_longer_for_a_candidate_that_has_begun_the_handshake() -> None:
    """A coordinator that takes over a large run needs seconds for the proofs of all members."""
    core = Member(attach(0, 1), 3, SETTINGS, now=0.0)
    core.handle(Tick(), 0.0)
    assert core.handle(Lost("the first candidate is lost"), 1.0) == [Dial(1)]
    core.handle(Accepted(), 1.1)
    core.handle(Challenged(), 3.4)
    assert core.handle(Tick(), 8.3) == []
    assert core.handle(Tick(), 8.5) == [Dial(2)]
    core.handle(Accepted(), 8.6)  # a stopped process accepts, and sends nothing
    assert core.handle(Tick(), 11.1) == [Dial(0)]


def test_a_join_ends_with_its_plan_even_if_the_epoch_is_over_before_the_thread_runs() -> None:
    with by_hand([[0, 0]]) as (session, coordinator):
        coordinator.say(coordinator.revoke(1))
        for bad, why in ((math.nan, "JSON"), ("x" * (8 << 20), "limit"), (nested(101), "deep"), (nested(9000), "deep")):
            with pytest.raises(ValueError, match=why):
                session.join(bad)
        with pytest.raises(TypeError, match="JSON"):
            session.join({1})
        joiner, plans = beside(lambda: session.join({}))
        coordinator.hear(Join)
        coordinator.say(coordinator.plan(1), coordinator.revoke(2))
        joiner.join(DEADLINE)
        assert [plan.epoch for plan in plans] == [1]
        assert session.wait_revoked(30)
        coordinator.stop(1)
        with pytest.raises(CoordinatorLost):
            session.join({})


def test_a_worker_hears_what_its_coordinator_says_before_connect_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The session's thread hears of the end of the run, and ends, before the thread that has started it goes on."""
    start, ended, heard = threading.Thread.start, list[bool](), list[int]()

    def start_and_join(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "recover-session":
            thread.join(DEADLINE)
            ended.append(not thread.is_alive())

    secret = Secret(b"x" * 32)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        coordinator, led = beside(lambda: ByHand(listener, secret, [[0, 0]]).stop(1))
        monkeypatch.setattr(threading.Thread, "start", start_and_join)
        Session.connect([listener.getsockname()[:2]], 0, secret, on_revoke=lambda epoch, _: heard.append(epoch))
        coordinator.join(DEADLINE)
        led[0].sock.close()
    assert ended == [True]
    assert heard == [0], "its part in the run is over"


def test_a_worker_says_that_it_has_heard_when_its_callbacks_have_returned_and_is_told_when_all_have() -> None:
    """Who waits for that asks for the end of an epoch that goes on."""
    stopped, said = threading.Event(), []
    stops = lambda epoch, _: epoch == 2 and said.append(stopped.wait())  # noqa: E731
    with by_hand([[0, 1]], on_revoke=stops) as (session, coordinator):
        coordinator.say(coordinator.revoke(1))
        assert coordinator.hear(Heard) == Heard(1, 1 << 32)
        joiner, _ = beside(lambda: session.join({}))
        coordinator.hear(Join)  # a join after the plan would ask for another one
        coordinator.say(coordinator.plan(1))
        joiner.join(DEADLINE)
        heard, _ = beside(lambda: session.wait_all_heard(1))
        assert coordinator.hear(Complain).epoch == 1
        coordinator.say(coordinator.revoke(2))
        stopped.set()
        assert coordinator.hear(Heard) == Heard(2, 1 << 32)
        assert said == [True]
        coordinator.say(to_member.AllHeard(1, 1 << 32))  # of an epoch before
        heard.join(0.05)
        assert heard.is_alive()
        coordinator.say(to_member.AllHeard(2, 1 << 32))
        heard.join(DEADLINE)
        assert not heard.is_alive()
        session.wait_all_heard(1)
        coordinator.stop(2)
        with pytest.raises(CoordinatorLost):
            session.wait_all_heard(2)


def test_the_loss_of_a_worker_is_waited_for_through_rendezvous_that_others_have_caused() -> None:
    with by_hand([[0, 2]]) as (session, coordinator):
        joiner, _ = beside(lambda: session.join({}))
        coordinator.say(coordinator.revoke(1))
        coordinator.hear(Join)
        coordinator.say(coordinator.plan(1))
        joiner.join(DEADLINE)
        coordinator.say(coordinator.revoke(2))
        assert session.wait_revoked(30)
        assert not session.wait_lost({0, 1}, 0.05)  # an epoch is revoked, but for others
        waiter, lost = beside(lambda: session.wait_lost({0, 1}, 30))
        coordinator.say(coordinator.revoke(3, [[1, 1]], members=[[0, 0], [2, 2]]))
        waiter.join(DEADLINE)
        assert lost == [True]
        coordinator.stop(3)
        with pytest.raises(CoordinatorLost):
            session.wait_lost({0}, 30)
