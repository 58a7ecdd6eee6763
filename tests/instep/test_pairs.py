"""A state from device to device, over NCCL's double: equal whatever dies or stands still, else by way of the hosts."""

from __future__ import annotations

import gc
import json
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from recover_megatron.collectives.epoch import EpochRevoked, PeerLost
from recover_megatron.collectives.nccl import communicator as communicator_module
from recover_megatron.collectives.nccl import library as libraries
from recover_megatron.collectives.nccl import pairs as pairs_module
from recover_megatron.collectives.nccl.pairs import Pair, Pairs
from recover_megatron.collectives.state import holder as state_holder
from recover_megatron.collectives.state import receiver as state_receiver
from recover_megatron.collectives.state.receiver import Receiver, Source
from recover_megatron.collectives.state.transport import SocketTransport
from recover_megatron.collectives.state.trees import new_memory
from tests.doubles.nccl import library as nccl_double
from tests.doubles.nccl import streams
from tests.doubles.nccl.communicator import Communicator
from tests.doubles.nccl.core import IN_PROGRESS, Core, Errors, NcclError
from tests.harness.waiting import DEADLINE, eventually
from tests.instep.states import Holder, fetch, holder_process, same, source, state_of, woken_in_the_middle

CHUNK = 1 << 14
MINE, THEIRS = torch.device("cpu", 0), torch.device("cpu", 1)


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[Core]:
    """NCCL's double, with one hardware queue a device; afterwards no communicator is left, on no device a stray."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setattr(streams, "_devices", {})
    its_double = nccl_double()
    monkeypatch.setattr(libraries, "load", lambda: its_double)
    yield its_double.core
    eventually(lambda: not its_double.core.live)
    assert its_double.core.strays == []


@pytest.fixture
def only_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the text and what is said about chunks goes over connections."""
    monkeypatch.setattr(SocketTransport, "send", lambda self, parts: pytest.fail("a chunk over a connection"))


def holder(count: int, worker: int = 0, pairs: Pairs | None = None) -> Holder:
    return Holder(state_of(1, count), worker, pairs=pairs or Pairs(THEIRS), chunk=CHUNK)


@pytest.mark.usefixtures("only_pairs")
@pytest.mark.parametrize("shared", [0, 3, 1 << 30], ids=["own", "some", "all"])
def test_a_state_goes_from_device_to_device(nccl: Core, shared: int) -> None:
    its = Holder(state_of(1, 8), shared=shared, pairs=Pairs(THEIRS), chunk=CHUNK)
    found, _ = fetch([its.source(pairs=Pairs(MINE))], shared)
    assert same(found, state_of(1, 8))
    its.given.wait(lambda: None)
    assert nccl.calls.count("init") == 2  # one pair


@pytest.mark.usefixtures("only_pairs", "nccl")
def test_several_holders_share_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    holders, gave = [holder(16, worker) for worker in range(3)], [threading.Event() for _ in range(3)]
    original = state_receiver._Link.chunk

    def chunk(self: Any, number: int, parts: Any) -> None:
        if gave[self.worker].is_set():  # nobody gives a second one before all have given one
            assert all(event.wait(DEADLINE) for event in gave)
        original(self, number, parts)
        gave[self.worker].set()

    monkeypatch.setattr(state_receiver._Link, "chunk", chunk)
    mine = Pairs(MINE)
    assert same(fetch([its.source(pairs=mine) for its in holders])[0], state_of(1, 16))


def test_a_chunk_is_asked_for_when_its_receive_stands(nccl: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no other one is under way at this worker then: a send finds its receive, and holds up nothing."""
    stands: list[bool] = []
    original = state_receiver._Link._send

    def request(self: Any, told: bytes) -> None:
        if state_holder.REQUEST.unpack_from(told)[0] >= 0:
            stream = mine._lanes[0].stream
            stands.append(not stream.in_progress and stream.launched - stream.over == 1)
        original(self, told)

    monkeypatch.setattr(state_receiver._Link, "_send", request)
    its, mine = holder(8), Pairs(MINE)
    assert same(fetch([its.source(pairs=mine)])[0], state_of(1, 8))
    assert len(stands) == len(its.given.chunks) == 8 * (1 << 17) // CHUNK
    assert all(stands)


@pytest.mark.usefixtures("only_pairs", "nccl")
def test_a_holder_gives_while_its_device_computes_and_sums() -> None:
    """With one hardware queue: beside a sum that does not end before the state is there, and kernels of the model."""
    over, computed = threading.Event(), threading.Event()
    sums = streams.Stream(THEIRS)
    sums.submit(lambda: over.wait(DEADLINE))
    for _ in range(20):
        streams.current_stream(THEIRS).submit(lambda: time.sleep(0.001))
    streams.current_stream(THEIRS).submit(computed.set)
    assert same(fetch([holder(8).source(pairs=Pairs(MINE))])[0], state_of(1, 8))
    assert computed.wait(DEADLINE)
    over.set()


def test_a_receiver_opens_few_pairs_however_many_hold_the_state() -> None:
    sources, nothing = [Source(worker, lambda: pytest.fail("asked"), Pairs(MINE)) for worker in range(9)], lambda: None
    further = Receiver(sources, new_memory, stay=nothing, awaited=nothing)._further(0)
    assert [source.worker for source in further] == list(range(1, 9))
    assert sum(source.pairs is not None for source in further) == state_receiver.STREAMS - 1


@pytest.mark.usefixtures("nccl")
def test_nothing_is_received_into_memory_that_an_earlier_kernel_may_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator gives out what was freed behind a kernel of the same stream; NCCL's stream does not wait for it."""
    model, original, idle = streams.current_stream(MINE), Pair._exchange, list[bool]()
    waited, drained = threading.Event(), Pair._drained
    model.submit(lambda: waited.wait(DEADLINE))

    def waits(self: Pair) -> None:
        waited.set()
        drained(self)

    def exchange(self: Pair, *message: Any, **named: Any) -> None:
        if self._device == MINE:
            idle.append(model.idle)
        original(self, *message, **named)

    monkeypatch.setattr(Pair, "_drained", waits)
    monkeypatch.setattr(Pair, "_exchange", exchange)
    assert same(fetch([holder(8).source(pairs=Pairs(MINE))])[0], state_of(1, 8))
    assert idle[0]


@pytest.mark.usefixtures("only_pairs", "nccl")
def test_who_waits_for_its_turn_to_receive_holds_up_no_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else two that receive from the same two holders could wait for each other."""
    its, busy, waits, original = holder(8), Pairs(MINE), threading.Event(), Pair.connect

    def connect(self: Pair, *asked: Any) -> None:
        if self._device == MINE:
            waits.set()
        original(self, *asked)

    monkeypatch.setattr(Pair, "connect", connect)
    with ThreadPoolExecutor(1) as pool:
        with busy._lanes[0].lock:
            later = pool.submit(fetch, [its.source(pairs=busy)])
            assert waits.wait(DEADLINE)
            assert same(fetch([its.source(pairs=Pairs(torch.device("cpu", 2)))])[0], state_of(1, 8))
        assert same(later.result(DEADLINE)[0], state_of(1, 8))


# ---- by way of the hosts


@pytest.mark.parametrize("who", ["holder", "receiver"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), PeerLost("NCCL reports error 2")], ids=repr)
def test_where_an_end_cannot_be_opened_all_goes_by_way_of_the_hosts(
    nccl: Core, who: str, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = Pair._exchange

    def exchange(self: Pair, *message: Any, **named: Any) -> None:
        original(self, *message, **named)
        if (self._device == THEIRS) == (who == "holder"):
            raise error

    monkeypatch.setattr(Pair, "_exchange", exchange)
    assert same(fetch([holder(8).source(pairs=Pairs(MINE))])[0], state_of(1, 8))
    assert "worker 0's state cannot be transferred from device to device" in caplog.text


@pytest.mark.parametrize("fails", ["get_unique_id", "opening"])
def test_the_log_says_in_plain_words_why_it_goes_by_way_of_the_hosts(
    nccl: Core, fails: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failed() -> Any:
        raise NcclError(2)

    if fails == "opening":
        monkeypatch.setattr(pairs_module, "OPENING_SECONDS", 0.2)
        monkeypatch.setattr(Communicator, "get_async_error", lambda self: IN_PROGRESS)
    else:
        monkeypatch.setattr(nccl, fails, failed)
    assert same(fetch([holder(8).source(pairs=Pairs(MINE))])[0], state_of(1, 8))
    (said,) = [one.message for one in caplog.records if one.levelname == "WARNING"]
    reasons = ["NCCL's double: result 2", "an NCCL operation did not finish in time"]
    reasons.append("the connection between receiver and holder was closed")  # the holder's time was over first
    assert said.removeprefix("worker 0's state cannot be transferred from device to device: ") in reasons


@pytest.mark.usefixtures("nccl")
def test_a_holder_without_nccl_gives_by_way_of_the_hosts() -> None:
    its = Holder(state_of(1, 8), chunk=CHUNK)
    assert same(fetch([its.source(pairs=Pairs(MINE))])[0], state_of(1, 8))


@pytest.mark.usefixtures("nccl")
def test_a_holder_whose_send_does_not_begin_is_asked_by_way_of_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs_module, "RECEIVING_SECONDS", 0.3)
    theirs = Pairs(THEIRS)
    its, begin, original = holder(8, pairs=theirs), threading.Event(), Pair.send

    def send(self: Pair, parts: Sequence[torch.Tensor]) -> int:
        begin.wait(DEADLINE)
        return original(self, parts)

    monkeypatch.setattr(Pair, "send", send)
    assert same(fetch([its.source(pairs=Pairs(MINE))])[0], state_of(1, 8))
    begin.set()


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize("call", ["recv", "send"])
def test_a_call_of_nccls_that_does_not_return_is_ended(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """By the end of its time at the receiver, by the end of the connection at the holder."""
    monkeypatch.setattr(pairs_module, "OPENING_SECONDS", 1.0)
    monkeypatch.setattr(communicator_module, "STUCK", 0.05)

    def stuck(self: Communicator, *_: Any, **__: Any) -> None:
        eventually(lambda: self.ended, "somebody aborts")
        raise Core.NcclInvalid("it was aborted")

    monkeypatch.setattr(Communicator, call, stuck)
    assert same(fetch([holder(8).source(pairs=Pairs(MINE))])[0], state_of(1, 8))


@pytest.mark.usefixtures("nccl")
def test_the_end_of_the_epoch_does_not_keep_it_from_the_way_by_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    its, over = holder(8), threading.Event()

    def send(self: Pair, parts: Sequence[torch.Tensor]) -> int:
        over.set()
        raise PeerLost("the test ends the pair")

    def awaited() -> None:
        if over.is_set():
            raise EpochRevoked(5, "the test ends it")

    monkeypatch.setattr(Pair, "send", send)
    assert same(fetch([its.source(pairs=Pairs(MINE))], awaited=awaited)[0], state_of(1, 8))
    assert over.is_set()


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize("again", [False, True], ids=["opens its pair", "connects again"])
def test_who_is_on_the_way_to_a_holder_is_not_waited_for(
    again: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The other one has given everything meanwhile."""
    monkeypatch.setattr(pairs_module, "OPENING_SECONDS", 1e6)
    leader, late = holder(8), holder(8, 1, Pairs(torch.device("cpu", 2)))
    there, go_on, opening, chunk = threading.Event(), threading.Event(), Pairs.open, state_receiver._Link.chunk
    first, mine = late.source(), Pairs(MINE)

    def connect() -> Any:
        if there.is_set():
            go_on.wait(DEADLINE)
        return first.connect()

    def opened(self: Pairs, *connection: Any, receives: bool) -> Pair:
        if receives or self.device == THEIRS:
            return opening(self, *connection, receives=receives)
        there.set()
        if again:
            raise PeerLost("no pair")
        go_on.wait(DEADLINE)
        return opening(self, *connection, receives=receives)

    def received(self: Any, number: int, parts: Any) -> None:
        assert there.wait(DEADLINE)
        chunk(self, number, parts)

    monkeypatch.setattr(Pairs, "open", opened)
    monkeypatch.setattr(state_receiver._Link, "chunk", received)
    sources = [leader.source(pairs=mine), replace(first, connect=connect, pairs=mine)]
    with ThreadPoolExecutor(1) as pool:
        try:
            assert same(pool.submit(fetch, sources).result(DEADLINE / 2)[0], state_of(1, 8))
        finally:
            go_on.set()
    eventually(lambda: not [one for one in threading.enumerate() if one.name == "receiving a state"])
    assert caplog.text.count("cannot be transferred from device to device") == again


@pytest.mark.usefixtures("nccl")
def test_nobody_keeps_the_memory_of_a_pair_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the errors, which have their frames, nor the offer: both devices have it again when it goes by the hosts."""
    rooms: list[weakref.ref[torch.Tensor]] = []
    exchange, by_hosts, its = Pair._exchange, SocketTransport.send, holder(8)

    def exchanged(self: Pair, *message: Any, **named: Any) -> None:
        rooms.append(weakref.ref(self._room))
        exchange(self, *message, **named)
        if len(rooms) > 8 and self._device == THEIRS:
            raise PeerLost("the test ends the pair")

    def sent(self: SocketTransport, parts: Sequence[torch.Tensor]) -> int:
        eventually(lambda: not any(room() is not None for room in rooms))
        return by_hosts(self, parts)

    monkeypatch.setattr(Pair, "_exchange", exchanged)
    monkeypatch.setattr(SocketTransport, "send", sent)
    gc.disable()
    try:
        assert same(fetch([its.source(pairs=Pairs(MINE))])[0], state_of(1, 8))
    finally:
        gc.enable()
    assert len(rooms) > 8


def test_a_message_that_an_abort_completes_is_not_believed(monkeypatch: pytest.MonkeyPatch, nccl: Core) -> None:
    """A holder gives up a send whose kernel has not begun: at the receiver the message is over, and garbage."""
    monkeypatch.setattr(pairs_module, "SENDING_SECONDS", 0.2)
    assert nccl.posts
    its, garbage, run, exchange, close = holder(8), threading.Event(), Communicator._run, Pair._exchange, Pair.close

    def stuck(self: Communicator, parts: list[Any]) -> None:
        if self.device == THEIRS.index and self.counts["1>0"] == 4:
            while not self.ended:
                time.sleep(0.005)
        run(self, parts)

    def exchanged(self: Pair, packed: torch.Tensor, *seconds: float, **named: Any) -> None:
        exchange(self, packed, *seconds, **named)
        if packed.eq(0x7F).all():
            garbage.set()

    def closed(self: Pair) -> None:
        close(self)
        if self._device == THEIRS:  # its connection still stands when the garbage arrives
            assert garbage.wait(DEADLINE)

    monkeypatch.setattr(Communicator, "_run", stuck)
    monkeypatch.setattr(Pair, "_exchange", exchanged)
    monkeypatch.setattr(Pair, "close", closed)
    assert same(fetch([its.source(pairs=Pairs(MINE))])[0], state_of(1, 8))
    assert garbage.is_set()


# ---- deaths


@pytest.mark.parametrize(
    ("errors", "mates", "number"),
    [
        *((errors, 1, signal.SIGKILL) for errors in Errors),
        (Errors.NEVER, 0, signal.SIGKILL),
        (Errors.NEVER, 1, signal.SIGSTOP),
    ],
    ids=["at once", "late", "never", "alone", "stopped"],
)
def test_a_holder_that_is_killed_in_the_middle(
    nccl: Core, errors: Errors, mates: int, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has not given comes from the other, whatever NCCL says of its death; without another one it is told."""
    monkeypatch.setattr(pairs_module, "RECEIVING_SECONDS", 1.0 if number == signal.SIGSTOP else DEADLINE)
    nccl.errors = errors
    others, killed, original = [holder(16, 1) for _ in range(mates)], threading.Event(), Pair.receive
    chunk_of = state_receiver._Link.chunk

    def chunk(self: Any, *its: Any) -> None:
        if self.source is not sources[0]:  # nothing comes from the other before
            killed.wait(DEADLINE)
        chunk_of(self, *its)

    def receive(self: Pair, parts: Sequence[torch.Tensor], ask: Callable[[], None]) -> int:
        def asked() -> None:
            if not killed.is_set():
                victim.send_signal(number)  # with a receive in the stream, that nobody will send to
                if number == signal.SIGKILL:
                    victim.wait()
                killed.set()
            ask()

        return original(self, parts, asked)

    with holder_process(1, 16, json.dumps({"errors": errors}), CHUNK) as (victim, address):
        monkeypatch.setattr(Pair, "receive", receive)
        monkeypatch.setattr(state_receiver._Link, "chunk", chunk)
        mine = Pairs(MINE)
        sources = [source(0, address, pairs=mine), *(one.source(pairs=mine) for one in others)]
        if others:
            assert same(fetch(sources)[0], state_of(1, 16))
        else:
            with pytest.raises(PeerLost):
                fetch(sources)
    assert killed.is_set()


@pytest.mark.usefixtures("nccl")
def test_what_is_given_up_is_not_stood_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver is gone before its receive: the next one is given the state while that send is still being aborted."""
    theirs, asked, aborted, abort = Pairs(THEIRS), threading.Event(), threading.Event(), Communicator.abort
    its = holder(8, pairs=theirs)

    def receive(self: Pair, parts: Sequence[torch.Tensor], ask: Callable[[], None]) -> int:
        ask()
        asked.set()
        while True:
            self._connection.check()

    def stay() -> None:
        stream = theirs._lanes[1].stream
        if asked.is_set() and stream is not None and stream.launched - stream.over == 1:
            raise EpochRevoked(5, "the test ends it")

    def late(self: Communicator) -> None:
        if self.device == THEIRS.index:
            aborted.wait(DEADLINE)
        abort(self)

    monkeypatch.setattr(Communicator, "abort", late)
    with monkeypatch.context() as patch:
        patch.setattr(Pair, "receive", receive)
        with pytest.raises(EpochRevoked):
            fetch([its.source(pairs=Pairs(MINE))], stay=stay)
    with pytest.raises(PeerLost):
        its.given.wait(lambda: None)
    monkeypatch.setattr(SocketTransport, "send", lambda self, parts: pytest.fail("a chunk over a connection"))
    try:
        assert same(fetch([its.source(pairs=Pairs(MINE))])[0], state_of(1, 8))
    finally:
        aborted.set()


@pytest.mark.usefixtures("nccl")
def test_who_may_not_stay_is_woken_in_the_middle_and_nothing_is_written_any_more() -> None:
    woken_in_the_middle(holder(4), Pairs(MINE))
