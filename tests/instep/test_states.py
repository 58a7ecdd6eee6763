"""A worker's state as text and tensors, its digest, its way: all arrives whoever of its holders dies, nothing false."""

from __future__ import annotations

import mmap
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recover_megatron.collectives.epoch import EpochRevoked, PeerLost
from recover_megatron.collectives.state import holder as state_holder
from recover_megatron.collectives.state import receiver as state_receiver
from recover_megatron.collectives.state import transport as digest_module
from recover_megatron.collectives.state.receiver import Source
from recover_megatron.collectives.state.transport import SocketTransport, bytes_of, cut, digest
from recover_megatron.collectives.state.trees import flatten, new_memory, unflatten
from recover_megatron.errors import Disagreement
from recover_megatron.network.connection import Unreachable
from recover_megatron.network.peer_store import PeerStoreServer, Streams, open_stream
from tests.harness.patience import patient
from tests.harness.waiting import DEADLINE
from tests.instep.states import SECRET, Holder, fetch, holder_process, same, source, state_of, woken_in_the_middle

DTYPES = [
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.int32, torch.bool, torch.uint8,
]  # fmt: skip


def tensor_of(dtype: torch.dtype, shape: list[int], seed: int) -> torch.Tensor:
    """Any bits, where any are allowed."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    size = dtype.itemsize * int(torch.tensor(shape).prod()) if shape else dtype.itemsize
    bits = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    return bits.view(dtype).view(shape) if size else torch.empty(shape, dtype=dtype)


tensors = st.builds(
    tensor_of, st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3), st.integers(0, 1 << 30)
)
plain = st.one_of(
    st.none(), st.booleans(), st.integers(-(1 << 70), 1 << 70), st.floats(allow_nan=False), st.text(max_size=5)
)
trees = st.recursive(
    st.one_of(tensors, plain),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.one_of(st.text(max_size=3), st.integers()), inner, max_size=4)
    ),
    max_leaves=12,
)


def carried(tree: Any) -> Any:
    """What arrives if the bytes arrive."""
    text, sent = flatten(tree)
    result, made = unflatten(text, new_memory)
    for mine, its in zip(made, sent, strict=True):
        mine.copy_(its)
    return result


# ---- text and tensors


@given(trees)
@settings(max_examples=100, deadline=None)
def test_a_tree_comes_back_as_it_was(tree: Any) -> None:
    assert same(carried(tree), tree)


def test_tuples_become_lists_and_views_become_whole() -> None:
    base = torch.arange(24.0).view(4, 6)
    result = carried({"views": (base.t(), base[1:, ::2]), 3: torch.tensor(7)})
    assert same(result, {"views": [base.t().contiguous(), base[1:, ::2].contiguous()], 3: torch.tensor(7)})


@pytest.mark.parametrize(
    "bad",
    [{1.5: 0}, {"a": object()}, {(1, 2): 0}, [{"x": {1, 2}}], b"bytes"],
    ids=["number as key", "object", "tuple as key", "set", "bytes"],
)
def test_what_cannot_be_told_in_text_is_refused(bad: Any) -> None:
    with pytest.raises(TypeError):
        flatten(bad)


def test_tensors_out_of_order_are_refused() -> None:
    text, _ = flatten([torch.zeros(1), torch.zeros(1)])
    with pytest.raises(Disagreement):
        unflatten(text.replace('"tensor": 0', '"tensor": 7'), new_memory)


# ---- the digest


@given(tensors.filter(lambda tensor: tensor.numel() > 0 and tensor.dtype is not torch.bool), st.data())
@settings(max_examples=150, deadline=None)
def test_any_flipped_bit_changes_the_digest(tensor: torch.Tensor, data: st.DataObject) -> None:
    changed = tensor.clone()
    view = bytes_of(changed)
    view[data.draw(st.integers(0, view.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
    around = [torch.ones(3), tensor, torch.zeros(2)]
    assert digest(around) != digest([around[0], changed, around[2]])


@pytest.mark.parametrize("word", [0, 1, (1 << 15) - 1, 1 << 15, (3 << 15) + 5, (1 << 23) + 7])
def test_every_bit_of_a_word_counts_wherever_it_is(word: int) -> None:
    tensor = torch.zeros((1 << 23) + 8, dtype=torch.int64)  # more than is looked at in one call
    before = digest([tensor])
    found = set()
    for bit in (0, 31, 32, 62, 63):
        tensor[word] = 1 << bit if bit < 63 else -(1 << 63)
        found.add(digest([tensor]))
    assert len(found) == 5
    assert before not in found


def test_the_order_and_the_lengths_change_the_digest() -> None:
    a, b = torch.arange(5.0), torch.arange(1.0, 6.0)
    assert digest([a, b]) != digest([b, a])
    assert digest([torch.cat([a, b])]) != digest([a, b])
    assert digest([torch.zeros(4)]) != digest([torch.zeros(5)])
    assert digest([torch.zeros(4), torch.empty(0)]) != digest([torch.zeros(4)])
    swapped = torch.arange(1 << 17)
    swapped[[3, (1 << 16) + 3]] = swapped[[(1 << 16) + 3, 3]]  # the same column of two rows
    assert digest([swapped]) != digest([torch.arange(1 << 17)])


def test_the_digest_does_not_depend_on_where_a_tensor_lies() -> None:
    base = torch.arange(100, dtype=torch.int16).to(torch.bfloat16)
    for start in range(1, 9):
        part = base[start : start + 50]  # words of 64 bits do not begin here
        assert digest([part]) == digest([part.clone()])
    matrix = torch.arange(12.0).view(3, 4)
    assert digest([matrix.t()]) == digest([matrix.t().contiguous()])


def test_other_devices_sum_rows_to_the_same() -> None:
    rows = torch.randint(-(1 << 63), (1 << 63) - 1, (5, 64))
    factors = torch.arange(1, 129, 2) * 0x9E3779B1
    assert digest_module._row_sums(rows, factors).equal((rows * factors).sum(1))


STATE = {
    "weights": [torch.arange(2000.0), torch.ones(7, 3, dtype=torch.bfloat16), torch.tensor(5)],
    "nothing": [torch.empty(0), None, {}],
    3: {"mask": torch.tensor([True, False, True]), "rate": 0.1},
    "more": [torch.full((n,), n, dtype=torch.float64) for n in (1, 127, 128, 129, 1000)],
}


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_holder, "CHUNK", 1 << 10)


# ---- cutting


@pytest.mark.parametrize("sizes", [[], [0], [5], [10, 0, 3], [1] * 700, [25, 7, 32]], ids=str)
def test_chunks_hold_every_byte_once_and_in_order(sizes: list[int]) -> None:
    chunks = list(cut(sizes, 10))
    pieces = [piece for chunk in chunks for piece in chunk]
    assert [(n, at) for n, start, stop in pieces for at in range(start, stop)] == [
        (n, at) for n, size in enumerate(sizes) for at in range(size)
    ]
    assert all(0 < sum(stop - start for _, start, stop in chunk) <= 10 for chunk in chunks)


# ---- what arrives


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("tree", [STATE, {}, [torch.empty(0, 3)], {"only": 1}], ids=["state", "empty", "none", "plain"])
@pytest.mark.parametrize("shared", [0, 2, 1 << 30], ids=["own", "some", "all"])
def test_a_state_arrives_as_it_is_held(tree: Any, shared: int) -> None:
    holder = Holder(tree, shared=shared)
    found, size = fetch([holder.source()], shared)
    assert same(found, tree)
    assert size == sum(tensor.nbytes for tensor in flatten(tree)[1])
    holder.given.wait(lambda: None)  # the holder has been told


def test_a_receiver_is_gone_when_its_last_connection_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver closes a connection that it does not need, and says over another one that it has all."""
    holder, ended = Holder(state_of(1, 2)), threading.Semaphore(0)
    noted = holder.given.disconnected
    monkeypatch.setattr(holder.given, "disconnected", lambda error: (noted(error), ended.release()))
    first, second = (state_receiver._Link(holder.source(), lambda: None, lambda *opened: None) for _ in range(2))
    second.close()
    assert ended.acquire(timeout=DEADLINE)
    first.ask(state_holder.DONE)
    holder.given.wait(lambda: None)
    first.close()
    another = Holder(state_of(1, 2))
    state_receiver._Link(another.source(), lambda: None, lambda *opened: None).close()
    with pytest.raises(PeerLost, match="the worker that was receiving this state is lost"):
        another.given.wait(lambda: None)


@pytest.mark.usefixtures("small_chunks")
def test_it_is_received_into_the_memory_that_is_named() -> None:
    holder, mine = Holder(state_of(2, 3)), state_of(1, 3)
    before = [tensor.data_ptr() for tensor in mine["column"]]
    found, _ = fetch([holder.source()], place=lambda path, shape, dtype: mine["column"][int(path[1])])
    assert [tensor.data_ptr() for tensor in found["column"]] == before
    assert same(mine, state_of(2, 3))


@pytest.mark.usefixtures("small_chunks")
def test_all_holders_share_the_work() -> None:
    holders = [Holder(state_of(1, 8), worker) for worker in range(3)]
    asked: list[set[int]] = [set() for _ in holders]
    everybody = threading.Barrier(3)
    for place, its in enumerate(holder.given for holder in holders):

        def parts(number: int, place: int = place, original: Any = its.parts) -> list[torch.Tensor]:
            if not asked[place]:
                asked[place].add(number)
                everybody.wait(DEADLINE)  # nobody is done before all were asked
            asked[place].add(number)
            return list(original(number))

        its.parts = parts  # type: ignore[method-assign]
    found, _ = fetch([holder.source() for holder in holders])
    assert same(found, state_of(1, 8))
    assert all(asked)


def test_a_state_that_is_offered_late_is_waited_for() -> None:
    holder, waits = Holder(), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        fetching = pool.submit(fetch, [holder.source()], awaited=waits.set)
        assert waits.wait(DEADLINE)
        holder.offer(STATE)
        assert same(fetching.result(DEADLINE)[0], STATE)


@pytest.mark.usefixtures("small_chunks")
def test_the_receiver_says_that_it_makes_progress_while_chunks_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three times the holder does not go on before the receiver has said so once more."""
    monkeypatch.setattr(state_holder, "LOOK_SECONDS", 0.001)
    holder, gate, said = Holder(state_of(1, 4)), threading.Lock(), threading.Semaphore(0)
    asked, heard = list[int](), list[bool]()
    original = holder.given.parts

    def parts(number: int) -> list[torch.Tensor]:
        with gate:
            asked.append(number)
            if len(asked) in (30, 60, 90):
                heard.append(said.acquire(timeout=DEADLINE))
            while len(asked) in (30, 60) and said.acquire(blocking=False):
                pass  # the rest arrives from now on
        return list(original(number))

    holder.given.parts = parts  # type: ignore[method-assign]
    assert same(fetch([holder.source()], progress=said.release)[0], state_of(1, 4))
    assert heard == [True] * 3


# ---- deaths


def test_a_holder_that_is_killed_in_the_middle_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is killed when the receiver has a chunk of it and has asked for more; the rest comes from the other one."""
    count = 512  # eight chunks
    mate = Holder(state_of(1, count), 1)
    killed = threading.Event()
    original = state_receiver._Link.chunk

    def chunk(self: Any, number: int, parts: Any) -> None:
        if self.worker == 1:
            assert killed.wait(DEADLINE)  # so the victim has not given all
        original(self, number, parts)
        if self.worker == 0 and not killed.is_set():
            victim.send_signal(signal.SIGKILL)
            victim.wait()
            killed.set()

    monkeypatch.setattr(state_receiver._Link, "chunk", chunk)
    with holder_process(1, count) as (victim, address):
        found, _ = fetch([source(0, address), mate.source()])
    assert killed.is_set()
    assert same(found, state_of(1, count))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("asked", ["text", "chunk"])
def test_nothing_is_awaited_of_a_dead_holder_whose_connection_stays_open(
    monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    """As the connections of a killed process do while the kernel takes its memory apart."""
    monkeypatch.setattr(state_holder, "LOOK_SECONDS", 0.01)
    mate, dead = Holder(state_of(1, 8), 1), threading.Event()
    ours, theirs = socket.socketpair()
    closing = threading.Timer(patient(10), theirs.close)
    theirs.sendall(state_holder.HELLO.pack(len(mate.given.text), mate.given.chunk, mate.given.layout))
    original = mate.given.parts

    def parts(number: int) -> list[torch.Tensor]:
        if not dead.is_set():
            theirs.recv(state_holder.REQUEST.size)  # it has been asked for something, and dies
            dead.set()
        return list(original(number))

    if asked == "text":
        dead.set()
    mate.given.parts = parts  # type: ignore[method-assign]
    silent = Source(0, lambda: ours)
    sources = [silent, mate.source()] if asked == "text" else [mate.source(), silent]
    closing.start()
    found, _ = fetch(sources, lost=lambda: [0] if dead.is_set() else [])
    assert closing.is_alive(), "the receiver waited until the connection was closed"
    closing.cancel()
    theirs.close()
    assert same(found, state_of(1, 8))


def test_the_first_holders_death_before_it_has_told_anything_is_survived() -> None:
    class Gone(Holder):
        def source(self, patience: Callable[[], None] = lambda: None) -> Source:
            def connect() -> socket.socket:
                raise Unreachable("it is dead")

            return Source(self.worker, connect)

    mate = Holder(STATE, 1)
    assert same(fetch([Gone().source(), mate.source()])[0], STATE)


def test_when_no_holder_is_left_the_receiver_is_told() -> None:
    holder = Holder(STATE)

    def dies(number: int) -> list[torch.Tensor]:
        raise IndexError(number)

    holder.given.parts = dies  # type: ignore[method-assign]
    with pytest.raises(PeerLost):
        fetch([holder.source()])
    with pytest.raises(PeerLost):
        holder.given.wait(lambda: None)


# ---- what is not to be believed


def altering(monkeypatch: pytest.MonkeyPatch, sender: Holder) -> None:
    """Have a bit changed between what ``sender`` offers and what arrives from it."""
    original = SocketTransport.send
    port = int(sender.peer_store.address.split(" ")[1])

    def send(self: SocketTransport, parts: Sequence[torch.Tensor]) -> int:
        if self._socket.getsockname()[1] != port:
            return original(self, parts)
        changed = [part.clone() for part in parts]
        changed[0][0] ^= 4
        right = original(self, changed)
        return right ^ 1

    monkeypatch.setattr(SocketTransport, "send", send)


@pytest.mark.usefixtures("small_chunks")
def test_a_corrupted_chunk_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    holder = Holder(STATE)
    altering(monkeypatch, holder)
    with pytest.raises(Disagreement):
        fetch([holder.source()])


@pytest.mark.usefixtures("small_chunks")
def test_what_one_holder_corrupts_comes_from_another(monkeypatch: pytest.MonkeyPatch) -> None:
    holders = [Holder(state_of(1, 8), worker) for worker in range(2)]
    altering(monkeypatch, holders[0])
    assert same(fetch([holder.source() for holder in holders])[0], state_of(1, 8))


@pytest.mark.usefixtures("small_chunks")
def test_what_is_read_while_the_state_changes_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    state = [torch.zeros(2000), torch.zeros(2000)]
    holder = Holder(state)
    original, sent = SocketTransport.send, []

    def send(self: SocketTransport, parts: Sequence[torch.Tensor]) -> int:
        if len(sent) == 5:
            holder.given.withdraw()
            state[0] += 1
        sent.append(parts)
        return original(self, parts)

    monkeypatch.setattr(SocketTransport, "send", send)
    with pytest.raises(PeerLost):
        fetch([holder.source()])


@pytest.mark.usefixtures("small_chunks")
def test_what_changes_between_its_check_sum_and_the_wire_was_withdrawn_not_corrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    holder = Holder(STATE)
    original = SocketTransport.send

    def send(self: SocketTransport, parts: Sequence[torch.Tensor]) -> int:
        right = original(self, parts)
        holder.given.withdraw()
        return right ^ 1

    monkeypatch.setattr(SocketTransport, "send", send)
    with pytest.raises(PeerLost):
        fetch([holder.source()])


def test_who_does_not_know_the_secret_is_given_nothing_and_believed_nothing() -> None:
    holder = Holder(STATE)
    stranger = source(0, holder.peer_store.address, secret=b"another one")
    with pytest.raises(PeerLost):
        fetch([stranger])


def test_a_holder_of_another_shape_is_not_asked() -> None:
    holders = [Holder(state_of(1, 200)), Holder(state_of(1, 199), 1)]
    holders[1].given.parts = lambda number: pytest.fail("it was asked")  # type: ignore[method-assign]
    assert same(fetch([holder.source() for holder in holders])[0], state_of(1, 200))


# ---- the end of an epoch


def test_who_waits_for_an_offer_is_woken_by_the_end_of_the_epoch() -> None:
    holder, waits, over = Holder(), threading.Event(), threading.Event()

    def awaited() -> None:
        waits.set()
        if over.is_set():
            raise EpochRevoked(5, "the test ends it")

    with ThreadPoolExecutor(1) as pool:
        fetching = pool.submit(fetch, [holder.source()], awaited=awaited)
        assert waits.wait(DEADLINE)
        over.set()
        with pytest.raises(EpochRevoked):
            fetching.result(DEADLINE)


@pytest.mark.usefixtures("small_chunks")
def test_who_may_not_stay_is_woken_in_the_middle_and_nothing_is_written_any_more() -> None:
    woken_in_the_middle(Holder(state_of(1, 4)))


def test_a_chunk_that_comes_when_all_was_given_up_keeps_nobody_waiting() -> None:
    missing = state_receiver._Missing(range(3))
    came, lost = (missing.take(wait=True) for _ in range(2))
    missing.give_up()
    missing.mark_arrived()
    missing.give_back([came or 0, lost or 0])
    assert missing.over
    assert not missing.complete
    assert missing.take(wait=True) is None


# ---- the connections


def test_a_connection_that_nobody_waits_for_is_kept_until_it_is_taken() -> None:
    peer_store = PeerStoreServer("127.0.0.1", SECRET)
    ours = open_stream(peer_store.address, SECRET, "tree/1")
    theirs = peer_store.streams.take("tree/1", lambda: None)
    ours.sendall(b"hello")
    assert theirs.recv(5) == b"hello"
    theirs.sendall(b"and you")
    assert ours.recv(7) == b"and you"
    ours.close()
    assert theirs.recv(1) == b""
    theirs.close()


def test_streams_go_to_who_serves_their_kind_also_those_that_came_before() -> None:
    streams, came = Streams(), []
    ends = [socket.socketpair() for _ in range(3)]
    streams.arrived("tree/1", ends[0][0])
    streams.arrived("state/1", ends[1][0])
    streams.serve("state", lambda name, sock: came.append((name, sock)))
    streams.arrived("state/2", ends[2][0])
    assert came == [("state/1", ends[1][0]), ("state/2", ends[2][0])]
    assert streams.take("tree/1", lambda: None) is ends[0][0]
    for end in ends:
        for sock in end:
            sock.close()


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_memory_of_a_state_goes_back_to_the_system_when_it_is_dropped() -> None:
    torch.empty(24 << 20, dtype=torch.uint8)  # once so much was freed the C library maps nothing smaller any more
    kept = [new_memory((), [1 << 18], torch.float32).zero_() for _ in range(64)]
    before = resident()
    del kept[::2]
    assert before - resident() > 24 << 20
