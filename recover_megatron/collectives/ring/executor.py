"""Fault-tolerant ring: a group that runs the programs of ``schedule`` over a transport.

The bucket contains the only copy of this worker's own gradient.  Only the finished sum overwrites it:

                     +--------- reduce-scatter half ----------+      +------ all-gather half ------+
    from the         | arrives in scratch                     |      | arrives in scratch          |
    predecessor ---> | ADD: scratch += own gradient, pass on  |      | STORE: copy to the bucket,  |
                     | FINISH (at the owner):                 |      |        mark it REDUCED,     |
                     |   bucket = scratch + own gradient,     |      |        pass it on           |
                     |   mark it REDUCED                      |      |                             |
                     +----------------------------------------+      +-----------------------------+

    one segment at one member:     LOCAL --FINISH or STORE--> REDUCED
    (a revocation cannot interrupt between the write and the mark, because it is checked only in waits for messages)

A message that this member sends contains the member's own gradient (hop 0), a partial sum in scratch memory, or a
finished segment of the bucket.  Scratch memory is reused only when the message in it has been sent.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch

from recover_megatron.collectives.chunks import Chunks, frozen
from recover_megatron.collectives.epoch import Epoch
from recover_megatron.collectives.group import BucketCollective, Group, Memo
from recover_megatron.collectives.ledger import Span
from recover_megatron.collectives.progress import Executor, Handle, Hook, ProgressThread, Task
from recover_megatron.collectives.ring.schedule import (
    Action,
    Program,
    Receive,
    Send,
    most_partials,
    plan,
    segment_length,
)
from recover_megatron.collectives.transport.interface import Arrival, Pending, Transport

LOOKAHEAD = 1
"""Number of receives that are posted in addition to the receive that the thread is waiting for."""
_MESSAGES = 32
"""Maximum number of messages that a call of ``Ring.advance`` processes after the first.

New tasks begin only at the start of a call.
"""
_TAG_MASK, _TAG_STRIDE = 0x7FFFFFFF, 0x9E3779B1

Parts = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]
"""(views of the bucket for the sends of a program, views for its receives), in the order of the program."""


def parts_of(flat: torch.Tensor, program: Program) -> Parts:
    views: dict[Span, torch.Tensor] = {}
    for span in {*(send.span for send in program.sends), *(receive.span for receive in program.receives)}:
        views[span] = flat[span.start : span.stop]
    return [views[send.span] for send in program.sends], [views[receive.span] for receive in program.receives]


@dataclass(eq=False)
class RingTask(Task):
    spec: BucketCollective
    program: Program
    to_send: Sequence[torch.Tensor]
    to_receive: Sequence[torch.Tensor]
    tag: int
    epoch_of: Callable[[int], int]
    """Function: index of a finished segment's first element -> epoch to record for the segment."""
    token: object
    stored: str
    """Step name for the hook when a received finished sum was copied to the bucket: "store" or "gather"."""
    posted: int = 0
    gone: int = 0
    asked: int = 0
    handled: int = 0
    partials: dict[int, Arrival] = field(default_factory=dict)

    def tag_of(self, position: int, span: Span) -> int:
        return (self.tag + position * _TAG_STRIDE + span.stop - span.start) & _TAG_MASK

    @property
    def over(self) -> bool:
        return self.handled == len(self.program.receives) and self.gone == len(self.program.sends)


_Sending = tuple[RingTask, Pending, Arrival | None]
"""(task, message being sent, arrival with the memory of the message; None if the message is no partial sum)."""
_Receiving = tuple[RingTask, Receive, Arrival]
# These are tuples because tuples are created fast, and each message needs one.


class Ring(Executor[RingTask]):
    """Executor of one group's tasks; a running task is a *run*.  Messages of successive runs follow without a pause."""

    def __init__(self, transport: Transport, hook: Hook | None = None) -> None:
        self._transport = transport
        self._transport.on_sent(self._reap)
        self._hook = hook
        self._used = 0
        """Number of segments of scratch memory that posted receives and unsent partial sums use."""
        self._handed_in: deque[RingTask] = deque()
        """Submitted tasks that have not begun, because the device may still be computing their buckets."""
        self._runs: deque[RingTask] = deque()
        self._to_send: deque[RingTask] = deque()
        self._to_ask: deque[RingTask] = deque()
        self._sending: deque[_Sending] = deque()
        self._receiving: deque[_Receiving] = deque()
        self._count = 0

    # ---- called by the progress thread

    def add(self, task: RingTask) -> None:
        self._count += 1
        task.tag = zlib.crc32(self._count.to_bytes(8, "little"), task.tag)
        self._handed_in.append(task)

    @property
    def busy(self) -> bool:
        return bool(self._runs or self._handed_in)

    def advance(self) -> None:
        while self._handed_in and (not self._runs or self._transport.begun(self._handed_in[0].token)):
            self._begin(self._handed_in.popleft())
        with self._transport.scope():
            self._step()
            for _ in range(_MESSAGES):  # process more messages that have arrived, without a return after each
                if not (self._receiving and self._receiving[0][2].done):
                    break
                self._step()

    def _begin(self, task: RingTask) -> None:
        self._transport.begin(task.token)
        for span in task.spec.final:
            task.spec.ledger.mark(span, task.epoch_of(span.start))
        for queue in (self._runs, self._to_send, self._to_ask):
            queue.append(task)

    def _step(self) -> None:
        if self._sending:
            self._reap()
        if self._to_send:
            self._post_sends()
            self._reap()  # releases memory of messages that are sent already, before this thread waits
        if self._to_ask:
            self._post_receives()
        if self._receiving:
            run, receive, arrival = self._receiving[0]
            self._transport.wait(arrival)
            self._receiving.popleft()
            self._handle(run, receive, arrival)
        elif self._sending:
            self._transport.wait(self._sending[0][1])
            self._reap()
        if self._runs and self._runs[0].over:
            self._finish_runs()

    def quiesce(self) -> None:
        self._transport.quiesce()

    def close(self) -> None:
        self._transport.close()
        for queue in (self._handed_in, self._runs, self._to_send, self._to_ask, self._sending, self._receiving):
            queue.clear()  # because the items keep the transport's memory and connections alive

    # ---- sending

    def _post_sends(self) -> None:
        """Send messages in program order, until one depends on a receive that is not processed yet."""
        while self._to_send:
            run = self._to_send[0]
            sends = run.program.sends
            while run.posted < len(sends):
                send = sends[run.posted]
                if send.after > run.handled:
                    return
                self._send(run, send)
                run.posted += 1
            self._to_send.popleft()

    def _send(self, run: RingTask, send: Send) -> None:
        partial = run.partials.pop(send.after - 1) if send.partial and send.hop else None
        tensor = run.to_send[run.posted] if partial is None else partial.tensor
        if self._hook:
            self._hook("send", send.hop)
        pending = self._transport.send(tensor, run.tag_of(run.posted, send.span))
        if self._hook:
            self._hook("sent", send.hop)
        self._sending.append((run, pending, partial))

    def _reap(self) -> None:
        sending = self._sending
        while sending and sending[0][1].done:
            run, _, partial = sending.popleft()
            run.gone += 1
            if partial is not None:
                self._release(partial)

    # ---- receiving

    def _post_receives(self) -> None:
        """Post the next receives: at most ``LOOKAHEAD`` in addition to the awaited one, while scratch has room."""
        while self._to_ask and len(self._receiving) <= LOOKAHEAD:
            run = self._to_ask[0]
            receives = run.program.receives
            if run.asked == len(receives):
                self._to_ask.popleft()
                continue
            if self._used > run.program.partials + LOOKAHEAD:
                # The successor lags, so partial sums accumulate on this member.  Waiting for a send cannot deadlock:
                # the member that lags most has room for the schedule's partial sums and one more segment.
                if self._receiving:
                    return
                self._transport.wait(self._sending[0][1])
                self._reap()
                continue
            receive = receives[run.asked]
            span = receive.span
            arrival = self._transport.recv(span.stop - span.start, run.spec.flat.dtype, run.tag_of(run.asked, span))
            self._receiving.append((run, receive, arrival))
            self._used += 1
            run.asked += 1

    def _handle(self, run: RingTask, receive: Receive, arrival: Arrival) -> None:
        """Do the action of ``receive`` on its segment, which has arrived in scratch memory.

        A revocation does not interrupt between the write to the bucket and the mark in the ledger.
        """
        scratch, hook, part = arrival.tensor, self._hook, run.to_receive[run.handled]
        if hook:
            hook("arrived", receive.hop)
        if receive.action is Action.ADD:
            scratch.add_(part)
            run.partials[run.handled] = arrival
        else:
            if receive.action is Action.FINISH:
                torch.add(scratch, part, out=part)
                self._mark(run, receive)
            elif not run.spec.ledger.covers(receive.span):
                part.copy_(scratch)
                self._mark(run, receive)
            self._release(arrival)
        run.handled += 1
        if hook:
            hook(run.stored if receive.action is Action.STORE else receive.action.value, receive.hop)

    def _mark(self, run: RingTask, receive: Receive) -> None:
        if self._hook:
            self._hook("written", receive.hop)
        run.spec.ledger.mark(receive.span, run.epoch_of(receive.span.start))

    # ---- the rest

    @property
    def scratch_peak(self) -> int:
        """Peak memory in bytes of received segments and partial sums, over all runs."""
        return self._transport.scratch_peak

    def _release(self, arrival: Arrival) -> None:
        self._transport.release(arrival)
        self._used -= 1

    def _finish_runs(self) -> None:
        while self._runs and self._runs[0].over:
            self._transport.finish()
            self._runs.popleft().handle.finish()


@dataclass(frozen=True)
class Tuning:
    """Parameters for the division of chunks into segments; equal on all members.

    The defaults were chosen with benchmarks/bench_ring.py.
    """

    segment_bytes: int = 512 << 10
    """Maximum length of a segment in bytes."""
    least_bytes: int = 128 << 10
    """Minimum length of a segment in bytes, if segments are shortened so that a chunk has ``depth`` of them."""
    depth: int = 2
    """Number of blocks of segments in flight at a time; see ``ring.schedule``."""

    @property
    def slots(self) -> int:
        """Number of segments for which a member needs memory: its maximum number of partial sums plus one arrival."""
        return most_partials(self.depth) + 1


@dataclass(frozen=True, slots=True)
class _Planned:
    """Program and its signature.

    Message tags are computed from the signature, so members detect that their programs differ.
    """

    program: Program
    signature: int


MOST_MESSAGES = 1 << 17
"""Maximum total number of messages in the programs that one group caches; about 20 MiB."""


class RingGroup(Group):
    """Group that sums over a ring; ``open_group`` creates it."""

    def __init__(
        self,
        epoch: Epoch,
        progress: ProgressThread,
        transport: Transport,
        *,
        device: torch.device | None = None,
        tuning: Tuning | None = None,
        hook: Hook | None = None,
    ) -> None:
        super().__init__(epoch, progress, device)
        self.tuning = tuning or Tuning()
        self._transport = transport
        self._planned: Memo[_Planned] = Memo(
            MOST_MESSAGES, lambda planned: len(planned.program.sends) + len(planned.program.receives)
        )
        self._views: Memo[tuple[torch.Tensor, Parts]] = Memo(MOST_MESSAGES, lambda views: sum(map(len, views[1])))
        self._serve(Ring(transport, hook))

    def segment_elements(self, chunks: Chunks, element_size: int) -> int:
        """Return the maximum number of elements of the segments into which ``chunks`` are cut."""
        tuning = self.tuning
        most, least = max(1, tuning.segment_bytes // element_size), tuning.least_bytes // element_size
        return segment_length(chunks, most, least, tuning.depth)

    def _start(self, collective: BucketCollective) -> Handle:
        spec, flat, what = collective, collective.flat, collective.what
        gather_hops = max(spec.to, default=0)  # in a ring, a chunk passes all members up to the farthest receiver
        key = what, flat.dtype, spec.reduce, gather_hops, frozen(spec.chunks)
        planned = self._planned.get(key, lambda: self._plan(what, flat.dtype, spec.chunks, spec.reduce, gather_hops))
        run = RingTask(
            spec, planned.program, *self._parts(what, flat, key, planned.program),
            tag=planned.signature, epoch_of=spec.epoch_of or (lambda _: self.epoch),
            token=self._transport.submitted(), stored="gather" if what == "all-gather" else "store",
        )  # fmt: skip
        return self._hand_in(run)

    def _parts(self, what: str, flat: torch.Tensor, key: Hashable, program: Program) -> Parts:
        """Return the views of ``flat`` for a program; cached for gradients, whose buckets are the same each iteration.

        The cache key contains ``id(flat)``.  The cached value refers to ``flat``, so no other tensor can get this id.
        """
        if what != "reduce":
            return parts_of(flat, program)
        return self._views.get((id(flat), key), lambda: (flat, parts_of(flat, program)))[1]

    def _plan(self, what: str, dtype: torch.dtype, chunks: Chunks, reduce: bool, gather_hops: int) -> _Planned:
        length = self.segment_elements(chunks, dtype.itemsize)
        program = plan(
            self.rank, chunks, length, reduce=reduce, gather_hops=gather_hops,
            depth=self.tuning.depth,
        )  # fmt: skip
        signature = f"{what} {dtype} {reduce} {gather_hops} {length} {frozen(chunks)}"
        return _Planned(program, zlib.crc32(signature.encode()))
