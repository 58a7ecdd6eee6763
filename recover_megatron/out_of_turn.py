"""Ends operations over replicas that a worker's program makes where no other worker comes to them: out of turn.

in a handler of a signal    the worker ends by that signal, as it does without the handler
in a thread of its own      the thread gets ``OutOfTurn``; the training goes on

A handler runs wherever its signal has met the main thread, so the other workers come to its operations by chance at
most, in another place of the training. Such an operation costs the worker that makes it, and never the run.

Threads that Python has not started are not looked at: PyTorch's autograd calls hooks of the backward pass in some.

The handler of SIGCHLD that a DataLoader sets raises an error, also inside of an optimizer's update: ``tell_readers``
has it raised where data is read.
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
"""The signals whose handlers run now in the main thread, the innermost last."""
_trainer: threading.Thread | None = None
"""The thread that trains; None: not known, so no thread is refused."""


class OutOfTurn(InStepError):
    """An operation over replicas that no other worker comes to: made in a thread that does not train."""


@dataclass(frozen=True)
class Handler:
    """A handler of a signal, which notes for ``keep_in_turn`` that it runs."""

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
    """The handler as the program has set it: it may compare it, and set it again later."""
    return handler.handler if isinstance(handler, Handler) else handler


_OF_TORCH = "DataLoader worker (pid "
"""Beginning of the error that torch's handler of SIGCHLD raises."""


@dataclass(frozen=True)
class _OfLoaders:
    """Wrapper of the handler of SIGCHLD of torch's DataLoader; ``told`` gets the error that the handler raises."""

    handler: Callable[[int, Any], Any]
    told: Callable[[RuntimeError], None]

    def __call__(self, number: int, frame: Any) -> None:
        try:
            self.handler(number, frame)
        except RuntimeError as error:
            if not str(error).startswith(_OF_TORCH):  # of the program's own handler: torch's calls it, or it torch's
                raise
            self.told(error)


def tell_readers(told: Callable[[RuntimeError], None]) -> None:
    """Give the errors of torch's handler of SIGCHLD to ``told``, which raises them only while data is read.

    An error that ``told`` drops is raised by the loader at its next read.  Torch sets its handler with the first loader
    that has processes: call this again after a read.
    """
    handler = signal.getsignal(signal.SIGCHLD)
    of_torch = handler.handler if isinstance(handler, _OfLoaders) else handler
    if callable(of_torch) and threading.current_thread() is threading.main_thread():  # only there handlers can be set
        signal.signal(signal.SIGCHLD, _OfLoaders(of_torch, told))


def begin() -> None:
    """Take the calling thread for the one that trains, and watch all handlers, those that are set from now on, too."""
    global _trainer
    if _trainer is None:
        set_handler, handler_of = signal.signal, signal.getsignal
        vars(signal).update(
            signal=functools.wraps(set_handler)(lambda number, handler: _plain(set_handler(number, _watched(handler)))),
            getsignal=functools.wraps(handler_of)(lambda number: _plain(handler_of(number))),
        )
        if threading.current_thread() is threading.main_thread():  # only there handlers can be set
            for number in signal.valid_signals():
                if (handler := signal.getsignal(number)) is not _watched(handler):
                    signal.signal(number, handler)
    _trainer = threading.current_thread()


def keep_in_turn(told: Callable[[], str], *, threads: bool) -> None:
    """Return where other workers may come to an operation that is made here; else end what makes it.

    ``told`` says which operation that is, and names its caller. ``threads``: whether it is refused in a thread, too.
    """
    me = threading.current_thread()
    if _running and me is threading.main_thread():
        _end_by(_running[-1], told())
    if threads and _trainer is not None and me is not _trainer and not isinstance(me, threading._DummyThread):
        what = f"{told()} in the thread {me.name!r}, to which no other worker comes"
        log.error(f"{what}: the thread gets an error, and the training goes on; call it in the thread that trains")
        raise OutOfTurn(what)


def _end_by(number: int, told: str) -> NoReturn:
    name = next((known.name for known in signal.Signals if known == number), f"signal {number}")
    log.error(
        f"{told} in a handler of {name}, to which no other worker comes: this worker ends by {name}, as it does "
        "without the handler. For a checkpoint and the end of all workers train with --exit-signal-handler, and send "
        "the signal to all"
    )
    with suppress(Exception):  # the handler may run inside of a print, and the pipe may be closed
        sys.stdout.flush()
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
    os._exit(128 + number)  # by default this signal ends nothing
