"""The double of torch.cuda's streams and events: what is enqueued runs in a thread, in the order of its stream.

Source: CUDA programming guide, "Streams" and "Events"; torch.cuda.Stream and torch.cuda.Event for the names.  Tensors
are CPU tensors: what the host does to them happens at once, before everything that is still enqueued.  That is harsher
than CUDA: a copy which is ordered before its source was waited for copies what was there before.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Illegal(AssertionError):
    """A call that NCCL's documents forbid.  No error of NCCL's: whoever handles those must not handle this one."""


class Stream:
    """A thread carries out what is enqueued, as long as there is something."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = _number(device)
        self.priority = priority
        self.in_progress = 0
        """Calls of NCCL's on this stream that are in progress."""
        self._changed = threading.Condition()
        self._queue: deque[Callable[[], None]] = deque()
        self._running = False

    def submit(self, work: Callable[[], None]) -> None:
        with self._changed:
            self._queue.append(work)
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="a CUDA stream's double", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._queue:
                    self._running = False
                    self._changed.notify_all()
                    return
                work = self._queue[0]
            work()
            with self._changed:
                self._queue.popleft()

    @property
    def idle(self) -> bool:
        with self._changed:
            return not self._running

    def synchronize(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._running)

    def wait_event(self, event: Event) -> None:
        self.submit(event.synchronize)


class Event:
    """Never recorded: over, as in CUDA (cudaEventQuery)."""

    def __init__(self, blocking: bool = False) -> None:
        self._over = threading.Event()
        self._over.set()

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        # ncclCommGetAsyncError: no CUDA kernels on streams used by NCCL before the state is ncclSuccess.  An event
        # recorded then may lie before the operation.
        if stream.in_progress:
            raise Illegal("an event is recorded on a stream while a call of NCCL's on it is in progress")
        self._over = over = threading.Event()
        if stream.idle:
            over.set()
        else:
            stream.submit(over.set)

    def query(self) -> bool:
        return self._over.is_set()

    def synchronize(self) -> None:
        self._over.wait()


_current = threading.local()


def current_stream(device: Any = None) -> Stream:
    """The default stream, one for each thread here."""
    del device
    if not hasattr(_current, "stream"):
        _current.stream = Stream()
    found: Stream = _current.stream
    return found


@contextmanager
def stream(chosen: Stream) -> Iterator[None]:
    """With it its device becomes the current one (torch.cuda.StreamContext)."""
    before = current_stream()
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
