"""The double of torch.cuda's streams and events: kernels stand in the hardware queues of their device.

    launch --> queue of the stream's, in the order of launches --the head starts--> runs in a thread --> over

The head of a queue starts when all that was launched before it into its stream, and the event that its stream waits
for, are over; until then all behind it stand still, of whatever stream.  A kernel that runs has left its queue.  An
event that is recorded stands in no queue: torch records one behind each collective of NCCL's, and what Megatron
overlaps with one queue would not overlap otherwise.

Sources: CUDA programming guide, "Streams", "Events", "Implicit Synchronization" (what depends on an earlier kernel of
its stream holds up all that is launched after it) and "CUDA Environment Variables"; torch.cuda.Stream and
torch.cuda.Event for the names.  Which stream has which queue no document tells: here they are given out in turn.

Tensors are CPU tensors: what the host does to them happens at once, before everything that is still enqueued.  That is
harsher than CUDA: a copy which is ordered before its source was waited for copies what was there before.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any


class Illegal(AssertionError):
    """A call that NCCL's documents forbid.  No error of NCCL's: whoever handles those must not handle this one."""


class Device:
    """``index``: its number.  ``connections``: its hardware queues."""

    def __init__(self, index: int, connections: int) -> None:
        self.index = index
        self.changed = threading.Condition()
        self._queues: list[deque[tuple[Stream, Callable[[], object] | Event]]] = [deque() for _ in range(connections)]
        self._given = 0
        self.default = Stream(self)
        """One for all threads."""

    def queue(self) -> deque[tuple[Stream, Callable[[], object] | Event]]:
        """That of a new stream."""
        with self.changed:
            self._given += 1
            return self._queues[(self._given - 1) % len(self._queues)]

    def start(self) -> None:
        """With ``changed``: all heads start that may."""
        waiting = True
        while waiting:
            waiting = False
            for queue in self._queues:
                while queue and queue[0][0].ready(queue[0][1]):
                    stream, work = queue.popleft()
                    if isinstance(work, Event):
                        stream.over += 1
                        waiting = True  # another queue's head may have waited for that
                    else:
                        stream.begin(work)


_devices: dict[int, Device] = {}
_making = threading.Lock()


def hardware(device: Any = None) -> Device:
    """The device of this number; without one the current one.  Ranks that are threads have a number each.

    Like the driver, it reads when it is first used how many queues it has.
    """
    number = _number(device)
    with _making:
        if number not in _devices:
            _devices[number] = Device(number, int(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "8")))
        return _devices[number]


class Stream:
    """``device``: of torch, as for ``hardware``."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = device if isinstance(device, Device) else hardware(device)
        self.priority = priority
        self.in_progress = 0
        """Calls of NCCL's on this stream that are in progress."""
        self.launched = self.over = 0
        """Kernels, and waits for events."""
        self._running: Callable[[], object] | None = None
        self._thread: threading.Thread | None = None
        self._queue = self.device.queue()

    def submit(self, work: Callable[[], object] | Event) -> None:
        """Launch a kernel, which is over when ``work`` returns; or have all later ones wait for an event.

        A test's kernel of the model is ``current_stream(device).submit(...)``: it may wait for whatever the test likes.
        """
        if self.in_progress:
            raise Illegal("a kernel is launched into a stream while a call of NCCL's on it is in progress")
        with self.device.changed:
            self.launched += 1
            self._queue.append((self, work))
            self.device.start()

    def ready(self, work: Callable[[], object] | Event) -> bool:
        """Whether what is at the head of the queue may start."""
        return self._running is None and (not isinstance(work, Event) or work.over)

    def begin(self, work: Callable[[], object]) -> None:
        self._running = work
        if threading.current_thread() is not self._thread:
            self._thread = threading.Thread(target=self._run, name="a CUDA stream's double", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        """A kernel, and those behind it that start when it is over."""
        while (work := self._running) is not None:
            work()
            with self.device.changed:
                self._running = None
                self.over += 1
                self.device.start()
                self.device.changed.notify_all()

    @property
    def idle(self) -> bool:
        return self.over == self.launched

    def synchronize(self) -> None:
        with self.device.changed:
            self.device.changed.wait_for(lambda: self.idle)

    def wait_event(self, event: Event) -> None:
        self.submit(copy(event))  # what is recorded in it later does not matter


class Event:
    """Never recorded: over, as in CUDA (cudaEventQuery)."""

    def __init__(self, blocking: bool = False) -> None:
        self._stream: Stream | None = None
        self._behind = 0
        """What was launched into the stream before."""

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        # ncclCommGetAsyncError: no CUDA kernels on streams used by NCCL before the state is ncclSuccess.  An event
        # recorded then may lie before the operation.
        if stream.in_progress:
            raise Illegal("an event is recorded on a stream while a call of NCCL's on it is in progress")
        self._stream, self._behind = stream, stream.launched

    @property
    def over(self) -> bool:
        return self._stream is None or self._stream.over >= self._behind

    def query(self) -> bool:
        return self.over

    def synchronize(self) -> None:
        if self._stream is not None:
            with self._stream.device.changed:
                self._stream.device.changed.wait_for(lambda: self.over)


_current = threading.local()


def current_stream(device: Any = None) -> Stream:
    """The one that ``stream`` has chosen in this thread, else the device's default stream."""
    chosen: Stream | None = getattr(_current, "stream", None)
    its = hardware(device)
    return chosen if chosen is not None and (device is None or chosen.device is its) else its.default


@contextmanager
def stream(chosen: Stream) -> Iterator[None]:
    """With it its device becomes the current one (torch.cuda.StreamContext)."""
    before = getattr(_current, "stream", None)
    _current.stream = chosen
    try:
        with device(chosen.device):
            yield
    finally:
        _current.stream = before


def _number(device: Any) -> int:
    """A device of the host may have one, too; without one it is the current one."""
    found = device if isinstance(device, int) else getattr(device, "index", None)
    return current_device() if found is None else found


def current_device() -> int:
    """That of the calling thread; of a new one the first (CUDA programming guide, "Device Selection")."""
    return getattr(_current, "device", 0)


def set_device(chosen: Any) -> None:
    _current.device = _number(chosen)


@contextmanager
def device(chosen: Any) -> Iterator[None]:
    before = current_device()
    set_device(chosen)
    try:
        yield
    finally:
        set_device(before)
