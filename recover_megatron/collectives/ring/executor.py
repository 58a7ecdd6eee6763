"""The fault-tolerant ring: carries out programs of ``schedule`` over a transport.

The bucket's own gradient is the only copy of the input, and it survives until the result is safe:

                     +--------- reduce-scatter half ----------+      +------ all-gather half ------+
    from the         | arrives in scratch                     |      | arrives in scratch          |
    predecessor ---> | ADD: scratch += my gradient, pass it on |      | STORE: copy to the bucket,  |
                     | FINISH (I am its owner):               |      |        mark it REDUCED,     |
                     |   bucket = scratch + my gradient,      |      |        pass it on           |
                     |   mark it REDUCED                      |      |                             |
                     +----------------------------------------+      +-----------------------------+

    one segment at one member:     LOCAL --FINISH or STORE--> REDUCED
    (the write and the mark follow each other with no point of interruption in between: a revocation is looked at only
    while waiting for a message)

What is sent is read from my gradient (hop 0), from scratch (a partial sum) or from a finished segment.  Scratch is used
again only when its message has gone.
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
"""How many receives are posted ahead of the one that is waited for."""
_MESSAGES = 32
"""So many messages are handled at most before what was handed in meanwhile is taken on."""
_TAG_MASK, _TAG_STRIDE = 0x7FFFFFFF, 0x9E3779B1

Parts = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]
"""What a program sends and receives, as parts of the bucket."""


def parts_of(flat: torch.Tensor, program: Program) -> Parts:
    views: dict[Span, torch.Tensor] = {}
    for span in {*(send.span for send in program.sends), *(receive.span for receive in program.receives)}:
        views[span] = flat[span.start : span.stop]
    return [views[send.span] for send in program.sends], [views[receive.span] for receive in program.receives]


@dataclass(eq=False)
class RingTask(Task):
    its: BucketCollective
    program: Program
    to_send: Sequence[torch.Tensor]
    to_receive: Sequence[torch.Tensor]
    tag: int
    epoch_of: Callable[[int], int]
    """What to mark a finished segment with, by its first element."""
    token: object
    stored: str
    """What the hook is told of a finished sum that has arrived."""
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
"""A message under way, and the partial sum that it is, if it is one."""
_Receiving = tuple[RingTask, Receive, Arrival]
# Tuples: one of each is made for every message, and the time counts.


class Ring(Executor[RingTask]):
    """Runs of one group, messages of later runs following those of earlier ones without a gap."""

    def __init__(self, transport: Transport, hook: Hook | None = None) -> None:
        self._transport = transport
        self._transport.on_sent(self._reap)
        self._hook = hook
        self._used = 0
        """Segments of scratch in the hands of receives and partial sums."""
        self._handed_in: deque[RingTask] = deque()
        """Those whose bucket may still be computed."""
        self._runs: deque[RingTask] = deque()
        self._to_send: deque[RingTask] = deque()
        self._to_ask: deque[RingTask] = deque()
        self._sending: deque[_Sending] = deque()
        self._receiving: deque[_Receiving] = deque()
        self._count = 0

    # ---- what the progress thread calls

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
            for _ in range(_MESSAGES):  # what has arrived already, without going round by the progress thread
                if not (self._receiving and self._receiving[0][2].done):
                    break
                self._step()

    def _begin(self, task: RingTask) -> None:
        self._transport.begin(task.token)
        for span in task.its.final:
            task.its.ledger.mark(span, task.epoch_of(span.start))
        for queue in (self._runs, self._to_send, self._to_ask):
            queue.append(task)

    def _step(self) -> None:
        if self._sending:
            self._reap()
        if self._to_send:
            self._post_sends()
            self._reap()  # what went at once gives its memory back before this thread waits for more
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

    def settle(self) -> None:
        self._transport.settle()

    def close(self) -> None:
        self._transport.close()
        for queue in (self._handed_in, self._runs, self._to_send, self._to_ask, self._sending, self._receiving):
            queue.clear()  # what they hold keeps the transport's memory and connections alive

    # ---- sending

    def _post_sends(self) -> None:
        """Hand over every message that is ready, in order."""
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
        """Ask for the next messages, as far ahead as is useful and as scratch allows."""
        while self._to_ask and len(self._receiving) <= LOOKAHEAD:
            run = self._to_ask[0]
            receives = run.program.receives
            if run.asked == len(receives):
                self._to_ask.popleft()
                continue
            if self._used > run.program.partials + LOOKAHEAD:
                # The successor lags: partial sums pile up.  One more than the schedule holds at once is enough for the
                # member that lags most, so waiting here can't close a circle.
                if self._receiving:
                    return
                self._transport.wait(self._sending[0][1])
                self._reap()
                continue
            receive = receives[run.asked]
            span = receive.span
            arrival = self._transport.recv(span.stop - span.start, run.its.flat.dtype, run.tag_of(run.asked, span))
            self._receiving.append((run, receive, arrival))
            self._used += 1
            run.asked += 1

    def _handle(self, run: RingTask, receive: Receive, arrival: Arrival) -> None:
        """Deal with a segment that is complete in scratch.  No point of interruption between write and mark."""
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
            elif not run.its.ledger.covers(receive.span):
                part.copy_(scratch)
                self._mark(run, receive)
            self._release(arrival)
        run.handled += 1
        if hook:
            hook(run.stored if receive.action is Action.STORE else receive.action.value, receive.hop)

    def _mark(self, run: RingTask, receive: Receive) -> None:
        if self._hook:
            self._hook("written", receive.hop)
        run.its.ledger.mark(receive.span, run.epoch_of(receive.span.start))

    # ---- the rest

    @property
    def scratch_peak(self) -> int:
        """The most bytes that arriving segments and partial sums ever took, over all runs."""
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
    """How buckets are cut; the same on all members.  Measured with benchmarks/bench_ring.py."""

    segment_bytes: int = 512 << 10
    """The longest segment."""
    least_bytes: int = 128 << 10
    """No segment is made shorter than this only to have several under way."""
    depth: int = 2
    """Blocks under way at a time; see ``schedule``."""

    @property
    def slots(self) -> int:
        """Segments that one member has room for: all partial sums that it may hold, and one that arrives."""
        return most_partials(self.depth) + 1


@dataclass(frozen=True, slots=True)
class _Planned:
    """A program, and what tells whether all members have the same."""

    program: Program
    signature: int


MOST_MESSAGES = 1 << 17
"""Limit of the programs that a group remembers, in messages: some 20 MiB."""


class RingGroup(Group):
    """Use ``open_group``."""

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
        """Elements of a segment for ``chunks``."""
        tuning = self.tuning
        most, least = max(1, tuning.segment_bytes // element_size), tuning.least_bytes // element_size
        return segment_length(chunks, most, least, tuning.depth)

    def _start(self, collective: BucketCollective) -> Handle:
        its, flat, what = collective, collective.flat, collective.what
        gather_hops = max(its.to, default=0)  # a ring gives it to all in between
        key = what, flat.dtype, its.reduce, gather_hops, frozen(its.chunks)
        planned = self._planned.get(key, lambda: self._plan(what, flat.dtype, its.chunks, its.reduce, gather_hops))
        run = RingTask(
            its, planned.program, *self._parts(what, flat, key, planned.program),
            tag=planned.signature, epoch_of=its.epoch_of or (lambda _: self.epoch),
            token=self._transport.submitted(), stored="gather" if what == "all-gather" else "store",
        )  # fmt: skip
        return self._hand_in(run)

    def _parts(self, what: str, flat: torch.Tensor, key: Hashable, program: Program) -> Parts:
        """Those of gradients are remembered: the next iteration wants the same.

        So is the bucket, which stays alive: no other tensor has its ``id``.
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
