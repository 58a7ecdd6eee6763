"""Protection of a run from operations over replicas that one worker calls out of turn, when no other worker takes part.

in a signal handler         the worker ends by that signal, as it does without the handler
in another thread           the thread gets ``OutOfTurn``; the training continues

A handler interrupts the main thread at an arbitrary place, so other workers could take part in the handler's operations
only by chance, at another place of the training.  Such an operation costs the worker that calls it, and never the run.

Threads that Python has not started are not checked, because PyTorch's autograd calls backward hooks in such threads.

The SIGCHLD handler that a DataLoader sets may raise an error anywhere, even inside an optimizer's update, so
``tell_readers`` delays the error until data is read.
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
"""Signals whose handlers run now in the main thread, the innermost last."""
_trainer: threading.Thread | None = None
"""The training thread; None: not known, so no thread is refused."""


class OutOfTurn(InStepError):
    """Error for an operation over replicas that was called outside the training thread: no other worker takes part."""


@dataclass(frozen=True)
class Handler:
    """Wrapper of a signal handler that records, for ``keep_in_turn``, while the handler runs."""

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
    """Return the handler as the program has set it: the program may compare it, and set it again later."""
    return handler.handler if isinstance(handler, Handler) else handler


_OF_TORCH = "DataLoader worker (pid "
"""Beginning of the error that torch's SIGCHLD handler raises."""


@dataclass(frozen=True)
class _OfLoaders:
    """Wrapper of the SIGCHLD handler of torch's DataLoader; ``told`` receives the error that the handler raises."""

    handler: Callable[[int, Any], Any]
    told: Callable[[RuntimeError], None]

    def __call__(self, number: int, frame: Any) -> None:
        try:
            self.handler(number, frame)
        except RuntimeError as error:
            if not str(error).startswith(_OF_TORCH):  # an error of the program's own handler
                raise
            self.told(error)


def tell_readers(told: Callable[[RuntimeError], None]) -> None:
    """Pass the errors of torch's SIGCHLD handler to ``told``, which raises them only while data is read.

    If ``told`` drops an error, the loader raises it at its next read.  Torch sets its handler when the first loader
    with processes starts, so call this function again after a read.
    """
    handler = signal.getsignal(signal.SIGCHLD)
    of_torch = handler.handler if isinstance(handler, _OfLoaders) else handler
    # Only the main thread can set handlers.
    if callable(of_torch) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, _OfLoaders(of_torch, told))


def begin() -> None:
    """Register the calling thread as the training thread, and wrap all signal handlers, present and future."""
    global _trainer
    if _trainer is None:
        set_handler, handler_of = signal.signal, signal.getsignal
        vars(signal).update(
            signal=functools.wraps(set_handler)(lambda number, handler: _plain(set_handler(number, _watched(handler)))),
            getsignal=functools.wraps(handler_of)(lambda number: _plain(handler_of(number))),
        )
        if threading.current_thread() is threading.main_thread():  # only in this thread can handlers be set
            for number in signal.valid_signals():
                if (handler := signal.getsignal(number)) is not _watched(handler):
                    signal.signal(number, handler)
    _trainer = threading.current_thread()


def keep_in_turn(told: Callable[[], str], *, threads: bool) -> None:
    """Stop the caller of an operation over replicas in which no other worker can take part; else return.

    In a signal handler, the process ends by the signal; in a thread other than the training thread, ``OutOfTurn`` is
    raised if ``threads`` is set.  ``told`` returns the names of the operation and its caller.
    """
    thread = threading.current_thread()
    if _running and thread is threading.main_thread():
        _end_by(_running[-1], told())
    if threads and _trainer is not None and thread is not _trainer and not isinstance(thread, threading._DummyThread):
        what = f"{told()} in the thread {thread.name!r}, where no other worker takes part in it"
        log.error(f"{what}: the thread gets an error, and the training continues; call it in the training thread")
        raise OutOfTurn(what)


def _end_by(number: int, told: str) -> NoReturn:
    name = next((known.name for known in signal.Signals if known == number), f"signal {number}")
    log.error(
        f"{told} in a handler of {name}, where no other worker takes part in it: this worker ends by {name}, as it "
        "does without the handler. For a checkpoint and an exit of all workers, train with --exit-signal-handler and "
        "send the signal to all workers"
    )
    with suppress(Exception):  # the handler may interrupt a print, and the pipe may be closed
        sys.stdout.flush()
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
    os._exit(128 + number)  # the default action of this signal does not terminate the process
