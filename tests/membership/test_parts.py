"""The pure parts: who hangs, who may go on, who holds the lease."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from cluster import cluster
from hypothesis import given
from hypothesis import strategies as st

from recover_megatron.membership import MembershipError, Session
from recover_megatron.membership.auth import read_secret_file
from recover_megatron.membership.detect import Progress, judge
from recover_megatron.membership.events import Verdict
from recover_megatron.membership.lease import Lease
from recover_megatron.membership.quorum import may_go_on

SETS = st.frozensets(st.integers(0, 5))


def test_a_worker_that_nobody_waits_for_does_not_hang() -> None:
    assert judge([Progress(0, marked=0.0), Progress(1, marked=99.0)], now=100.0, hang_timeout=10.0).hung == []


def test_a_worker_without_a_mark_while_another_waits_for_it_hangs() -> None:
    waiting = Progress(0, marked=50.0, waiting_since=50.0)
    assert judge([waiting, Progress(1, marked=0.0)], now=59.0, hang_timeout=10.0).hung == []
    assert judge([waiting, Progress(1, marked=0.0)], now=61.0, hang_timeout=10.0).hung == [1]
    assert judge([waiting, Progress(1, marked=55.0)], now=61.0, hang_timeout=10.0).hung == []


def test_a_declared_long_phase_is_no_hang_until_it_is_over() -> None:
    group = [Progress(0, waiting_since=0.0), Progress(1, allow=100.0)]
    assert judge(group, now=105.0, hang_timeout=10.0).hung == []
    assert judge(group, now=111.0, hang_timeout=10.0).hung == [1]


def test_when_all_wait_for_each_other_nobody_is_blamed() -> None:
    judgement = judge([Progress(n, marked=0.0, waiting_since=1.0) for n in range(3)], now=12.0, hang_timeout=10.0)
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
