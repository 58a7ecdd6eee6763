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

A segment is thus always either the untouched gradient or the finished sum.  What is sent is read from my gradient (hop
0), from scratch (a partial sum) or from a finished segment.  Scratch is used again only when its message has gone.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from recover_megatron.collectives.ledger import Ledger, Span
from recover_megatron.collectives.ring.progress import Executor, Task
from recover_megatron.collectives.ring.schedule import Action, Program, Receive, Send
from recover_megatron.collectives.transport.interface import Arrival, Pending, Transport

_MESSAGES = 32
"""So many messages are handled at most before what was handed in meanwhile is taken on."""
_TAG_MASK, _TAG_STRIDE = 0x7FFFFFFF, 0x9E3779B1

Hook = Callable[[str, int], None]
"""For tests: called at every boundary of a message with its name and its hop.

``send`` before a message is handed to the transport, ``sent`` after; ``arrived`` when one is complete in scratch;
``written`` between the write of a finished segment and its mark; ``add``, ``finish`` or ``store`` after (``gather``
instead of ``store`` in an all-gather).
"""


Parts = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]
"""What a program sends and receives, as parts of the bucket."""


def parts_of(flat: torch.Tensor, program: Program) -> Parts:
    views: dict[Span, torch.Tensor] = {}
    for span in {*(send.span for send in program.sends), *(receive.span for receive in program.receives)}:
        views[span] = flat[span.start : span.stop]
    return [views[send.span] for send in program.sends], [views[receive.span] for receive in program.receives]


@dataclass(eq=False)
class RingTask(Task):
    """One collective on one bucket."""

    flat: torch.Tensor
    ledger: Ledger
    program: Program
    to_send: Sequence[torch.Tensor]
    to_receive: Sequence[torch.Tensor]
    tag: int
    epoch_of: Callable[[int], int]
    """What to mark a finished segment with, by its first element."""
    final: Sequence[Span]
    """Spans that are finished as they are (a ring of one member, an owner's shard), marked at the start."""
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
        self._transport.begin(task.token)
        for span in task.final:
            task.ledger.mark(span, task.epoch_of(span.start))
        for queue in (self._runs, self._to_send, self._to_ask):
            queue.append(task)

    @property
    def busy(self) -> bool:
        return bool(self._runs)

    def advance(self) -> float:
        with self._transport.scope():
            self._step()
            for _ in range(_MESSAGES):  # what has arrived already, without going round by the progress thread
                if not (self._receiving and self._receiving[0][2].done):
                    break
                self._step()
        return 0.0

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
        for queue in (self._runs, self._to_send, self._to_ask, self._sending, self._receiving):
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
        """Take back what has gone."""
        sending = self._sending
        while sending and sending[0][1].done:
            run, _, partial = sending.popleft()
            run.gone += 1
            if partial is not None:
                self._release(partial)

    # ---- receiving

    def _post_receives(self) -> None:
        """Ask for the next messages, as far ahead as is useful and as scratch allows."""
        ahead = self._transport.lookahead
        while self._to_ask and len(self._receiving) <= ahead:
            run = self._to_ask[0]
            receives = run.program.receives
            if run.asked == len(receives):
                self._to_ask.popleft()
                continue
            if self._used > run.program.partials + ahead:
                # The successor lags: partial sums pile up.  One more than the schedule holds at once is enough for the
                # member that lags most, so waiting here can't close a circle.
                if self._receiving:
                    return
                self._transport.wait(self._sending[0][1])
                self._reap()
                continue
            receive = receives[run.asked]
            span = receive.span
            arrival = self._transport.recv(span.stop - span.start, run.flat.dtype, run.tag_of(run.asked, span))
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
            elif not run.ledger.covers(receive.span):
                part.copy_(scratch)
                self._mark(run, receive)
            self._release(arrival)
        run.handled += 1
        if hook:
            hook(run.stored if receive.action is Action.STORE else receive.action.value, receive.hop)

    def _mark(self, run: RingTask, receive: Receive) -> None:
        if self._hook:
            self._hook("written", receive.hop)
        run.ledger.mark(receive.span, run.epoch_of(receive.span.start))

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


class Scratch:
    """A pool of equal buffers; grows to what a collective needs, counts its peak."""

    def __init__(self, device: torch.device, *, pinned: bool = False) -> None:
        """``pinned``: host memory that a GPU copies from and to without a detour."""
        self._device = device
        self._pinned = pinned
        self._size = 0
        self._free: list[torch.Tensor] = []
        self.bytes = 0
        """Bytes allocated now."""
        self.peak = 0
        """The most bytes ever allocated."""

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of ``numel`` elements with arbitrary content; ``give`` it back."""
        needed = numel * dtype.itemsize
        if needed > self._size:
            self._drop()
            self._size = needed
        if not self._free:
            self._free.append(torch.empty(self._size, dtype=torch.uint8, device=self._device, pin_memory=self._pinned))
            self.bytes += self._size
            self.peak = max(self.peak, self.bytes)
        return self._free.pop()[:needed].view(dtype)

    def give(self, tensor: torch.Tensor) -> None:
        """Take back what ``take`` gave, when nothing reads or writes it any more."""
        storage = tensor.untyped_storage()
        if storage.nbytes() < self._size:  # of before the buffers grew
            self.bytes -= storage.nbytes()
            return
        self._free.append(torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage))

    def _drop(self) -> None:
        self.bytes -= sum(buffer.nbytes for buffer in self._free)
        self._free.clear()
