"""The state machine of a communicator over the double of NCCL: what is believed, and how it ends."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from recover_megatron.collectives.epoch import CancelToken, EpochRevoked, PeerLost
from recover_megatron.collectives.nccl import communicator as tested
from recover_megatron.collectives.nccl.communicator import Communicator, State
from recover_megatron.collectives.nccl.library import Library, checked
from recover_megatron.errors import UserError
from recover_megatron.membership.records import Fenced
from tests.doubles.nccl import library as double
from tests.doubles.nccl.core import IN_PROGRESS, Errors
from tests.doubles.nccl.net import net
from tests.doubles.nccl.streams import Illegal, Stream, current_device, device, set_device
from tests.harness.waiting import eventually


def all_gather(communicator: Communicator, stream: Stream, output: torch.Tensor, source: torch.Tensor) -> Any:
    """Launch one."""

    def event() -> Any:
        recorded = communicator.library.cuda.Event()
        recorded.record(stream)
        return recorded

    return communicator.launch(lambda its: its.allgather(source, output, stream=stream), event, output, source)


OPENED: list[Communicator] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while OPENED:
        OPENED.pop().close()


class Member:
    """One rank, with a stream of its own."""

    def __init__(self, library: Library, rank: int, size: int, unique_id: Any) -> None:
        self.library = library
        self.token = CancelToken(1)
        handle = library.core.Communicator.init(size, rank, unique_id, library.config())
        self.communicator = Communicator(library, handle, "first", self.token, rank=rank, size=size)
        self.stream = Stream(torch.device("cpu", rank))
        OPENED.append(self.communicator)

    def open(self) -> Member:
        eventually(self.communicator.advance, "the communicator is open", every=0.0001)
        return self

    def all_gather(self, output: torch.Tensor, source: torch.Tensor) -> Any:
        return all_gather(self.communicator, self.stream, output, source)

    def is_ended_in(self, wait: Callable[[], Any]) -> None:
        """``wait`` is ended by the switch, and what is under way settles."""
        threading.Timer(0.02, self.token.cancel, ["a test ends the epoch"]).start()
        with pytest.raises(EpochRevoked):
            wait()
        self.communicator.quiesce()

    def gathered(self) -> list[float]:
        output = torch.zeros(2)
        self.communicator.wait(self.all_gather(output, torch.tensor([float(self.communicator.handle.rank)])))
        return output.tolist()


def members(library: Library, size: int = 2) -> list[Member]:
    """On the current device."""
    unique_id = library.core.get_unique_id()
    with ThreadPoolExecutor(size, initializer=set_device, initargs=[current_device()]) as pool:
        found = list(pool.map(lambda rank: Member(library, rank, size, unique_id).open(), range(size)))
        list(pool.map(Member.gathered, found))  # the first operation connects them
    return found


@pytest.mark.parametrize("polls", [0, 3, 40])
def test_an_operation_that_was_waited_for_is_whole_however_long_calls_are_in_progress(polls: int) -> None:
    both = members(double(polls=polls, seed=polls))
    with ThreadPoolExecutor(2) as pool:
        for _ in range(5):
            assert list(pool.map(Member.gathered, both)) == [[0.0, 1.0]] * 2
    assert [member.communicator.state for member in both] == [State.READY] * 2
    assert [member.communicator.operations for member in both] == [6, 6]


def test_a_revocation_ends_an_operation_that_nobody_answers() -> None:
    """The kernel completes all the same, with garbage: its event tells nothing."""
    member, _ = members(double())
    output = torch.zeros(2)
    operation = member.all_gather(output, torch.ones(1))
    assert not operation.done
    member.is_ended_in(lambda: member.communicator.wait(operation))
    eventually(lambda: operation.done, "the aborted operation is over")
    assert not torch.equal(output, torch.ones(2))
    assert member.communicator.state is State.CLOSED
    with pytest.raises(EpochRevoked):
        member.communicator.believe()


def test_a_member_that_is_out_of_the_run_aborts_nothing_that_is_under_way() -> None:
    member, _ = members(double())

    def out() -> None:
        raise Fenced("a test puts it out")

    member.token.all_heard = out
    member.all_gather(torch.zeros(2), torch.ones(1))
    member.token.cancel("a test ends the epoch")
    with pytest.raises(Fenced):
        member.communicator.quiesce()
    assert "abort" not in member.library.core.calls
    member.token.all_heard = lambda: None


def test_what_was_complete_before_the_switch_is_not_believed_after_it() -> None:
    """Whether it was complete before the abort cannot be told from its event."""
    both = members(double())
    with ThreadPoolExecutor(2) as pool:
        operations = list(pool.map(lambda it: it.all_gather(torch.zeros(2), torch.ones(1)), both))
    eventually(lambda: operations[0].done, "the operation is over")
    both[0].token.cancel("a test ends the epoch")
    with pytest.raises(EpochRevoked):
        both[0].communicator.wait(operations[0])


@pytest.mark.parametrize("errors", [Errors.AT_ONCE, Errors.LATE])
def test_an_error_that_nccl_reports_is_a_lost_peer_and_nothing_is_believed(
    errors: Errors, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = double(errors=errors)
    both = members(library)
    monkeypatch.setattr(both[0].communicator.handle, "addresses", ["127.0.0.1:1", "127.0.0.1:2"])
    monkeypatch.setattr(net(), "dead", {"127.0.0.1:2"})
    output = torch.zeros(2)
    with pytest.raises(PeerLost, match="error 6"):
        both[0].communicator.wait(both[0].all_gather(output, torch.ones(1)))
    both[0].communicator.quiesce()
    assert both[0].communicator.state is State.CLOSED
    assert both[0].communicator.operations == 1


def test_an_error_that_is_told_before_anything_was_launched_ends_the_communicator() -> None:
    """Kept, it would end every further epoch."""
    member, _ = members(double())
    member.communicator.handle._error = 6
    with pytest.raises(PeerLost, match="error 6"):
        member.all_gather(torch.zeros(2), torch.ones(1))
    member.communicator.quiesce()
    assert member.communicator.state is State.CLOSED


def test_a_first_operation_that_the_others_never_join_is_ended_by_the_switch() -> None:
    """It stays in progress, in which nothing but an abort is allowed."""
    library, unique_id = double(), double().core.get_unique_id()
    with ThreadPoolExecutor(2) as pool:
        member, _ = pool.map(lambda rank: Member(library, rank, 2, unique_id).open(), range(2))
    member.is_ended_in(lambda: member.all_gather(torch.zeros(2), torch.ones(1)))
    assert member.communicator.state is State.CLOSED


def test_an_opening_whose_other_member_never_comes_is_ended_by_the_switch() -> None:
    library = double()
    member = Member(library, 0, 2, library.core.get_unique_id())
    for _ in range(10):
        assert not member.communicator.advance()
    member.token.cancel("a test ends the epoch")
    with pytest.raises(EpochRevoked):
        member.communicator.advance()
    assert member.communicator.state is State.CLOSED


def test_another_thread_aborts_when_the_owner_is_stuck_in_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tested, "STUCK", 0.05)
    with device(1):
        member, _ = members(double())
    handle, entered = member.communicator.handle, threading.Event()

    def stuck(*_: Any, **__: Any) -> None:
        entered.set()
        eventually(lambda: handle.ended, "somebody aborts")
        raise member.library.errors[0](3)

    monkeypatch.setattr(handle, "allgather", stuck)
    threading.Thread(target=lambda: (entered.wait(), member.token.cancel("a test ends the epoch"))).start()
    with device(1), pytest.raises(EpochRevoked):
        member.all_gather(torch.zeros(2), torch.ones(1))
    assert member.communicator.state is State.CLOSED
    assert member.library.core.strays == [], "the guard is a new thread, whose device is the first one"


def test_what_nccl_was_handed_is_kept_though_the_launch_was_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL may launch it all the same, until the abort is over: the memory must be nobody else's before."""
    member, _ = members(double())
    tensor = torch.zeros(2)
    alive = weakref.ref(tensor)

    def call(handle: Any) -> None:  # NCCL knows addresses only
        monkeypatch.setattr(handle, "get_async_error", lambda: IN_PROGRESS)
        member.token.cancel("a test ends the epoch")

    with pytest.raises(EpochRevoked):
        member.communicator.launch(call, lambda: pytest.fail("it is in progress"), tensor)
    del tensor
    assert alive() is not None


def guards() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == tested.GUARD]


def test_nobody_aborts_a_communicator_whose_owner_is_busy_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two epochs, an orderly change: it is kept."""
    monkeypatch.setattr(tested, "STUCK", 0.01)
    member, _ = members(double())
    member.token.cancel("the epoch is over")
    member.communicator.quiesce()
    member.communicator.release()
    eventually(lambda: not guards(), "the guard has ended")
    assert member.communicator.state is State.READY
    assert "abort" not in member.library.core.calls
    member.communicator.adopt(CancelToken(2))
    assert member.communicator.advance()


def test_the_double_knows_illegal_calls() -> None:
    member, _ = members(double(polls=0))
    handle = member.communicator.handle
    handle._polls = 3
    with pytest.raises(Illegal, match="in progress"):
        handle.allgather(torch.ones(1), torch.ones(2), stream=member.stream)
    handle._polls = 0
    with device(1):
        handle.abort()
    assert member.library.core.strays == ["abort: the current device was 1, not 0"]
    assert len(member.library.core.live) == 1, "the other member's"


def test_an_old_nccl_is_refused_with_what_to_do() -> None:
    with pytest.raises(UserError, match=r"NCCL 2\.26\.5, .* 2\.27\.0 or later"):
        checked(double((2, 26, 5)))
    assert checked(double((2, 27, 7)))
