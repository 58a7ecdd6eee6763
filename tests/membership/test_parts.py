"""The pure parts: who hangs, who may go on, who holds the lease."""

from __future__ import annotations

import queue
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from cluster import cluster
from hypothesis import given
from hypothesis import strategies as st

from recover_megatron.membership import CoordinatorLost, MembershipError, Session, wire
from recover_megatron.membership.auth import Secret, read_secret_file
from recover_megatron.membership.detect import Judgement, WorkerProgress, judge
from recover_megatron.membership.events import Verdict
from recover_megatron.membership.lease import Lease
from recover_megatron.membership.quorum import may_go_on
from recover_megatron.network.proof import nonce

SETS = st.frozensets(st.integers(0, 5))


def test_a_worker_that_nobody_waits_for_does_not_hang() -> None:
    assert (
        judge([WorkerProgress(0, marked=0.0), WorkerProgress(1, marked=99.0)], now=100.0, hang_timeout=10.0).hung == []
    )


def test_stopped_workers_whose_mates_cannot_say_that_they_wait_are_seen_when_nobody_makes_a_mark() -> None:
    group = [WorkerProgress(0, marked=5.0, heard=99.0), WorkerProgress(1, marked=5.0, heard=4.0)]
    assert judge(group, now=14.0, hang_timeout=10.0) == Judgement()
    assert judge(group, now=100.0, hang_timeout=10.0) == Judgement([1])
    assert judge(group, now=100.0, hang_timeout=10.0, fresh=95.0) == Judgement()
    assert judge([*group, WorkerProgress(2, marked=95.0, heard=99.0)], now=100.0, hang_timeout=10.0) == Judgement()


def test_a_worker_without_a_mark_while_another_waits_for_it_hangs() -> None:
    waiting = WorkerProgress(0, marked=50.0, waiting_since=50.0)
    assert judge([waiting, WorkerProgress(1, marked=0.0)], now=59.0, hang_timeout=10.0).hung == []
    assert judge([waiting, WorkerProgress(1, marked=0.0)], now=61.0, hang_timeout=10.0).hung == [1]
    assert judge([waiting, WorkerProgress(1, marked=55.0)], now=61.0, hang_timeout=10.0).hung == []


def test_a_declared_long_phase_is_no_hang_until_it_is_over() -> None:
    group = [WorkerProgress(0, waiting_since=0.0), WorkerProgress(1, allow=100.0)]
    assert judge(group, now=105.0, hang_timeout=10.0).hung == []
    assert judge(group, now=111.0, hang_timeout=10.0).hung == [1]


def test_what_a_mark_allows_holds_only_while_the_worker_is_heard() -> None:
    waiting = WorkerProgress(0, waiting_since=0.0)
    writes = WorkerProgress(1, allow=1000.0, heard=99.0)
    stopped = WorkerProgress(1, allow=1000.0, heard=1.0)
    assert judge([waiting, writes], now=100.0, hang_timeout=10.0).hung == []
    assert judge([waiting, stopped], now=100.0, hang_timeout=10.0).hung == [1]
    assert judge([waiting, stopped], now=9.0, hang_timeout=10.0).hung == []


def test_when_all_wait_for_each_other_nobody_is_blamed() -> None:
    judgement = judge([WorkerProgress(n, marked=0.0, waiting_since=1.0) for n in range(3)], now=12.0, hang_timeout=10.0)
    assert judgement.stuck
    assert judgement.hung == []


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


def test_one_coordinator_at_a_time_holds_the_lease(tmp_path: Path) -> None:
    verdicts: list[Verdict] = []
    first, second = (Lease(tmp_path / "lease", name, 10.0, verdicts.append) for name in ("a", "b"))
    assert first.attempt(0.0)
    assert not second.attempt(1.0)
    assert first.attempt(9.0)  # renewed
    assert not second.attempt(11.5)  # it has watched this renewal from now on
    assert not second.attempt(21.0)
    assert second.attempt(21.5)
    assert not first.attempt(22.0)
    first.close()
    second.close()


@pytest.mark.parametrize("content", ["garbage", '{"owner": 3', "[]"])
def test_an_unreadable_lease_is_waited_for_like_any_other(tmp_path: Path, content: str) -> None:
    path = tmp_path / "lease"
    path.write_text(content)
    lease = Lease(path, "a", 10.0, lambda verdict: None)
    assert not lease.attempt(0.0)
    assert lease.attempt(10.0)
    lease.close()


def test_storage_that_fails_gives_no_lease(tmp_path: Path) -> None:
    lease = Lease(tmp_path / "missing" / "lease", "a", 10.0, lambda verdict: None)
    assert not lease.attempt(0.0)
    lease.close()


LOCK = "import fcntl, sys; file = open(sys.argv[1], 'r+'); fcntl.lockf(file, fcntl.LOCK_EX); print(flush=True); input()"


def test_a_lease_that_another_looks_at_just_now_is_not_lost(tmp_path: Path) -> None:
    """Its holder hears nothing, neither that it holds it on nor that it does not; then it renews it."""
    path = tmp_path / "lease"
    verdicts: queue.Queue[Verdict] = queue.Queue()
    lease = Lease(path, "a", 3.0, verdicts.put)
    lease.ask(1)
    assert verdicts.get(timeout=30).held_until > 0
    command = [sys.executable, "-c", LOCK, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        assert other.stdout.readline()
        while not verdicts.empty():
            assert verdicts.get().held_until > 0
        assert lease.attempt(time.monotonic()) is None
        time.sleep(1.0)
        assert verdicts.empty()
        other.stdin.close()
    assert verdicts.get(timeout=30).held_until > time.monotonic()
    lease.close()


def test_a_lease_that_was_released_is_not_renewed_until_it_is_asked_for_again(tmp_path: Path) -> None:
    verdicts: queue.Queue[Verdict] = queue.Queue()
    lease = Lease(tmp_path / "lease", "a", 0.8, verdicts.put)
    lease.ask(1)
    assert verdicts.get(timeout=30).held_until > 0
    lease.release()
    other = Lease(tmp_path / "lease", "b", 0.8, lambda verdict: None)
    while not other.attempt(time.monotonic()):
        time.sleep(0.05)
    other.close()
    lease.ask(3)
    while verdicts.get(timeout=30).held_until > 0:
        pass
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


class ByHand:
    """A coordinator of one worker, whose messages the test writes."""

    def __init__(self, listener: socket.socket, secret: Secret) -> None:
        self.sock, _ = listener.accept()
        self.sock.settimeout(30)
        self.decoder = wire.Decoder(wire.MAX_HANDSHAKE, wire.HANDSHAKE_TO_COORDINATOR)
        challenge = nonce()
        self.say({"type": "challenge", "version": wire.PROTOCOL_VERSION, "nonce": challenge})
        auth = self.hear("auth")
        self.decoder.limit, self.decoder.schemas = wire.MAX_TO_COORDINATOR, wire.TO_COORDINATOR
        self.say({"type": "proof", "mac": secret.mac("coordinator", challenge, auth["nonce"])})

    def say(self, *messages: dict[str, Any]) -> None:
        """All at once."""
        self.sock.sendall(b"".join(wire.encode(message) for message in messages))

    def hear(self, kind: str) -> dict[str, Any]:
        while True:
            while (message := self.decoder.next()) is None:
                self.decoder.feed(self.sock.recv(1 << 16))
            if message["type"] == kind:
                return message


def test_a_join_ends_with_its_plan_even_if_the_epoch_is_over_before_the_thread_runs() -> None:
    secret = Secret(b"x" * 32)
    common = {"term": 1 << 32, "members": [[0, 0]]}

    def revoke(epoch: int) -> dict[str, Any]:
        return {"type": "revoke", "epoch": epoch, "dead": [], "left": [], "committed": 0, "reason": "a test", **common}

    with socket.create_server(("127.0.0.1", 0)) as listener:
        session = Session.connect([listener.getsockname()[:2]], 0, secret)
        coordinator = ByHand(listener, secret)
        coordinator.say(revoke(1))
        plans = []
        joiner = threading.Thread(target=lambda: plans.append(session.join({})), daemon=True)
        joiner.start()
        coordinator.hear("join")
        coordinator.say({"type": "plan", "epoch": 1, "committed": 0, **common}, revoke(2))
        joiner.join(30)
        assert [plan.epoch for plan in plans] == [1]
        assert session.wait_revoked(30)
        coordinator.say({"type": "stop", "code": 0, "reason": "the test is over", "epoch": 1})
        with pytest.raises(CoordinatorLost):
            session.join({})
        coordinator.sock.close()


def test_the_loss_of_a_worker_is_waited_for_through_rendezvous_that_others_have_caused() -> None:
    secret = Secret(b"x" * 32)

    def revoke(epoch: int, members: list[list[int]], dead: list[list[int]]) -> dict[str, Any]:
        told = {"type": "revoke", "epoch": epoch, "term": 1 << 32, "members": members, "dead": dead}
        return {**told, "left": [], "committed": 0, "reason": "a test"}

    with socket.create_server(("127.0.0.1", 0)) as listener:
        session = Session.connect([listener.getsockname()[:2]], 0, secret)
        coordinator = ByHand(listener, secret)
        joiner = threading.Thread(target=lambda: session.join({}), daemon=True)
        joiner.start()
        coordinator.say(revoke(1, [[0, 2]], []))
        coordinator.hear("join")
        coordinator.say({"type": "plan", "epoch": 1, "committed": 0, "term": 1 << 32, "members": [[0, 2]]})
        joiner.join(30)
        coordinator.say(revoke(2, [[0, 2]], []))
        assert session.wait_revoked(30)
        assert not session.wait_lost({0, 1}, 0.05)  # an epoch is revoked, but for others
        lost: list[bool] = []
        waiter = threading.Thread(target=lambda: lost.append(session.wait_lost({0, 1}, 30)), daemon=True)
        waiter.start()
        coordinator.say(revoke(3, [[0, 0], [2, 2]], [[1, 1]]))
        waiter.join(30)
        assert lost == [True]
        coordinator.say({"type": "stop", "code": 0, "reason": "the test is over", "epoch": 3})
        with pytest.raises(CoordinatorLost):
            session.wait_lost({0}, 30)
        coordinator.sock.close()
