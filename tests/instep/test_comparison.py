"""A worker that runs another program than the run ends alone; what it tells ends nobody else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from recover_megatron.collectives import comparison
from recover_megatron.collectives.comparison import ComparedStatus, OwnDescription, odd_ones
from recover_megatron.instep.decision import JoinStatus
from recover_megatron.instep.faults import EXIT_REFUSED, OtherFlags
from recover_megatron.instep.meeting.planner import Planner
from recover_megatron.membership.records import CoordinatorLost
from recover_megatron.network.peer_store import PeerStoreServer

SECRET = b"x" * 32
FLAGS = {"--lr": "0.1", "recover_megatron": "0.1.0"}
CODE = {"train.py": "11", "net.py": "22", "package torch": "2.15.0"}


class Worker:
    """``me`` of a run, with a peer store of its own."""

    def __init__(self, me: int, code: dict[str, str] = CODE, flags: dict[str, str] = FLAGS, *, placed: bool) -> None:
        self.me, self.store = me, PeerStoreServer("127.0.0.1", SECRET)
        self.own, self.placed = OwnDescription(flags, code, self.store, SECRET), placed

    def status(self, **changed: Any) -> dict[str, Any]:
        status = JoinStatus(
            self.me if self.placed else None,
            version=3 if self.placed else None,
            peer_store=self.store.address,
            flags=self.own.given,
            code=self.own.code,
        )
        return {**status.to_json(), **changed}

    def reads(self, joined: dict[int, Any]) -> dict[int, JoinStatus]:
        """The statuses with which this worker decides; whether it gave the run up is in ``given_up``."""
        self.given_up: list[Any] = []

        def over() -> None:
            raise CoordinatorLost("given up", EXIT_REFUSED)

        session = SimpleNamespace(
            give_up=lambda *said: self.given_up.append(said), wait_revoked=lambda *_: True, check=over
        )
        planner: Any = SimpleNamespace(
            _assignment=SimpleNamespace(me=self.me), _session=session, own=self.own, node="here"
        )
        return Planner._of_the_same_program(planner, joined)


def run(*more: Worker) -> dict[int, Any]:
    workers = [Worker(0, placed=True), Worker(1, placed=True), *more]
    return {worker.me: worker.status() for worker in workers}


def test_a_newcomer_with_an_edited_script_is_refused_and_the_file_named() -> None:
    newcomer = Worker(7, {**CODE, "train.py": "99"}, placed=False)
    with pytest.raises(OtherFlags, match=r"another program than worker 1: the content of train.py differs") as refused:
        newcomer.reads(run(newcomer))
    assert refused.value.code == EXIT_REFUSED
    assert newcomer.given_up == []


@pytest.mark.parametrize(
    "code",
    [
        CODE,
        {**CODE, "only_here.py": "33"},
        {"train.py": "11"},
        {**CODE, "package torch": "2.15.1"},
        {},
    ],
    ids=["the same", "one module more", "fewer modules", "another patch", "not compared"],
)
def test_a_newcomer_with_the_program_of_the_run_is_let_in(code: dict[str, str]) -> None:
    newcomer = Worker(7, code, placed=False)
    assert set(newcomer.reads(run(newcomer))) == {0, 1, 7}


def test_a_worker_is_compared_once_with_what_it_was_started_with() -> None:
    newcomer, joined = Worker(7, {**CODE, "late.py": "1"}, placed=False), run()
    newcomer.reads({**joined, 7: newcomer.status()})
    for status in joined.values():
        status["peer_store"] = "127.0.0.1 1"
    assert set(newcomer.reads({**joined, 7: newcomer.status()})) == {0, 1, 7}


def test_a_program_that_nobody_shows_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "ASKED_SECONDS", 0.1)
    newcomer, joined = Worker(7, {**CODE, "train.py": "99"}, placed=False), run()
    for status in joined.values():
        status["peer_store"] = "127.0.0.1 1"
    assert set(newcomer.reads({**joined, 7: newcomer.status()})) == {0, 1, 7}


def test_a_launch_whose_workers_run_different_programs_does_not_begin() -> None:
    odd = Worker(2, {**CODE, "net.py": "99"}, placed=True)
    with pytest.raises(CoordinatorLost):
        odd.reads(run(odd))
    ((code, why),) = odd.given_up
    assert code == EXIT_REFUSED
    assert "worker 2 on node here runs another program than worker 0: the content of net.py differs" in why


def test_a_newcomer_with_another_version_of_this_package_is_refused_before_it_reads_the_statuses() -> None:
    newcomer = Worker(7, flags={**FLAGS, "recover_megatron": "0.2.0"}, placed=False)
    joined = run(newcomer)
    for status in joined.values():
        status["unknown here"] = 1
    with pytest.raises(OtherFlags, match=r"recover_megatron 0\.2\.0 \(the run: 0\.1\.0\)"):
        newcomer.reads(joined)


@pytest.mark.parametrize("version", ["0.1.0", "0.2.0"])
@pytest.mark.parametrize("changed", [{"since": 3}, {"ran": None}, None])
def test_a_status_of_a_newcomer_that_cannot_be_read_ends_nobody_else(version: str, changed: Any) -> None:
    newcomer = Worker(7, flags={**FLAGS, "recover_megatron": version}, placed=False)
    joined = {**run(), 7: None if changed is None else newcomer.status(**changed)}
    healthy = Worker(0, placed=True)
    assert set(healthy.reads(joined)) == {0, 1}
    assert healthy.given_up == []


def test_replica_0_has_a_place_and_a_state_of_iteration_0_is_one() -> None:
    told = ComparedStatus.of({"replica": 0, "version": 0}, "replica", "version", "peer_store")
    assert (told.placed, told.holds) == (True, True)
    assert not ComparedStatus.of({"holds": False}, "holds", "holds", "address").placed


def test_the_program_of_the_run_is_that_of_the_workers_with_a_place() -> None:
    told = {
        0: ComparedStatus(code="a", placed=True),
        5: ComparedStatus(code="b"),
        6: ComparedStatus(code="b"),
        7: ComparedStatus(),
    }
    assert odd_ones(told, "code").workers == {5, 6}
