"""Protection of a run from a worker that calls an operation over replicas in which no other worker takes part.

Such an operation must not stop the run.  The effect depends on its caller:

a signal handler                        the signal terminates the worker, as if the program had set no handler
a thread except the training thread     ``OutOfTurn`` is raised in the thread; the training continues

A signal handler interrupts the main thread at an arbitrary place of the training.  Other workers are at other places,
so they could take part in the handler's operations only by chance.

Threads that Python has not started are not checked, because PyTorch's autograd calls backward hooks in such threads.

The SIGCHLD handler that a DataLoader sets may raise an error at any place, even inside an optimizer's update.
``tell_readers`` delays this error until the program reads data.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from recover_megatron.errors import InStepError
from recover_megatron.logger import get_logger

log = get_logger(__name__)

_running: list[int] = []
"""Signals whose handlers run in the main thread now; the innermost handler's is last."""
_trainer: threading.Thread | None = None
"""The training thread; None if it is unknown, so that operations in any thread are allowed."""


class OutOfTurn(InStepError):
    """Error for a call of an operation over replicas in a thread other than the training thread."""


@dataclass(frozen=True)
class Handler:
    """Wrapper of a signal handler, which records for ``keep_in_turn`` that the handler is running."""

    handler: Callable[[int, Any], Any]

    def __call__(self, number: int, frame: Any) -> Any:
        """Run the handler."""
        _running.append(number)
        try:
            return self.handler(number, frame)
        finally:
            _running.pop()


def _watched(handler: Any) -> Any:
    is_own = callable(handler) and not isinstance(handler, Handler) and handler is not signal.default_int_handler
    return Handler(handler) if is_own else handler


def _plain(handler: Any) -> Any:
    """Return ``handler`` without its wrapper: the program may compare it with its own handler, or set it again."""
    return handler.handler if isinstance(handler, Handler) else handler


_OF_TORCH = "DataLoader worker (pid "
"""Beginning of the error message of torch's SIGCHLD handler."""


@dataclass(frozen=True)
class _OfLoaders:
    """Wrapper of the SIGCHLD handler of torch's DataLoader; passes errors that the handler raises to ``on_error``."""

    handler: Callable[[int, Any], Any]
    on_error: Callable[[RuntimeError], None]

    def __call__(self, number: int, frame: Any) -> None:
        try:
            self.handler(number, frame)
        except RuntimeError as error:
            if not str(error).startswith(_OF_TORCH):  # the program has set another handler, which raised this error
                raise
            self.on_error(error)


def tell_readers(on_error: Callable[[RuntimeError], None]) -> None:
    """Wrap the SIGCHLD handler of torch's DataLoader, so that errors that it raises are passed to ``on_error``.

    ``on_error`` raises the error if the program is reading data now, and otherwise drops it; the loader raises a
    dropped error at its next read.  Torch sets its handler when the first loader with processes starts, so call this
    function again after a read.  Does nothing outside the main thread.
    """
    handler = signal.getsignal(signal.SIGCHLD)
    of_torch = handler.handler if isinstance(handler, _OfLoaders) else handler
    # Python lets only the main thread set signal handlers.
    if callable(of_torch) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, _OfLoaders(of_torch, on_error))


def begin() -> None:
    """Register the calling thread as the training thread, and wrap all signal handlers, present and future."""
    global _trainer
    if _trainer is None:
        set_handler, handler_of = signal.signal, signal.getsignal
        vars(signal).update(
            signal=functools.wraps(set_handler)(lambda number, handler: _plain(set_handler(number, _watched(handler)))),
            getsignal=functools.wraps(handler_of)(lambda number: _plain(handler_of(number))),
        )
        if threading.current_thread() is threading.main_thread():  # only the main thread can set handlers
            for number in signal.valid_signals():
                if (handler := signal.getsignal(number)) is not _watched(handler):
                    signal.signal(number, handler)
    _trainer = threading.current_thread()


def keep_in_turn(describe: Callable[[], str], *, threads: bool) -> None:
    """Check that an operation over replicas is not called in a signal handler, or outside the training thread.

    In a signal handler, terminates the process by the signal.  If ``threads`` is true, raises ``OutOfTurn`` in a thread
    other than the training thread.  ``describe`` returns the names of the operation and its caller, for the message.
    """
    thread = threading.current_thread()
    if _running and thread is threading.main_thread():
        _end_by(_running[-1], describe())
    if threads and _trainer is not None and thread is not _trainer and not isinstance(thread, threading._DummyThread):
        what = f"{describe()} in the thread {thread.name!r}, where no other worker takes part in it"
        log.error(f"{what}: the thread gets an error, and the training continues; call it in the training thread")
        raise OutOfTurn(what)


def _end_by(number: int, operation: str) -> NoReturn:
    name = next((known.name for known in signal.Signals if known == number), f"signal {number}")
    log.error(
        f"{operation} in a handler of {name}, where no other worker takes part in it: {name} ends this worker, as "
        "if no handler were set. For a checkpoint and an exit of all workers, train with --exit-signal-handler and "
        "send the signal to all workers"
    )
    with suppress(Exception):  # the handler may interrupt a print, and the pipe may be closed
        sys.stdout.flush()
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
    os._exit(128 + number)  # reached if the signal's default action does not terminate the process
