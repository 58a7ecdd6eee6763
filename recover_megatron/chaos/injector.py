"""Strikes at the places that a fault specification names, from inside the worker."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable

from recover_megatron.chaos.spec import Fault, Kind
from recover_megatron.logger import get_logger

log = get_logger(__name__)


class InjectedFault(RuntimeError):
    """The exception of a fault of kind ``raise``."""


class InjectedExit(SystemExit):
    """That of kind ``exit``."""


class Injector:
    """The faults of one worker.  Call ``at`` at every visit of a phase."""

    def __init__(self, faults: Iterable[Fault], worker: int, break_device: Callable[[], None] | None = None) -> None:
        """``break_device``: how the worker's CUDA device is broken; None: it has none."""
        self._waiting: dict[tuple[str, int], dict[int, Fault]] = {}
        for fault in faults:
            if fault.worker == worker:
                self._waiting.setdefault((fault.phase, fault.iteration), {})[fault.visit] = fault
        self._visits = dict.fromkeys(self._waiting, 0)
        self._break_device = break_device
        self._lock = threading.Lock()  # a phase may be visited by several threads (several buckets in flight)
        self.active = bool(self._waiting)
        """Whether any fault of this worker is still to come.  False: ``at`` need not be called."""

    def at(self, phase: str, iteration: int) -> None:
        """The worker is at ``phase`` of ``iteration`` (counted from 1): strike if this visit is to be struck.

        Does not return from kind ``kill``; returns from ``stop`` when somebody sends SIGCONT.  Raises InjectedFault for
        ``raise`` and SystemExit for ``exit``, in the thread that called.  After ``device`` the next CUDA call fails.
        """
        if not self.active or (phase, iteration) not in self._waiting:
            return
        fault = self._visit(phase, iteration)
        if fault is not None:
            self._inject(fault)

    def _visit(self, phase: str, iteration: int) -> Fault | None:
        """Count the visit; the fault that strikes at it."""
        with self._lock:
            place = phase, iteration
            if place not in self._waiting:
                return None  # another thread took its last fault
            self._visits[place] += 1
            fault = self._waiting[place].pop(self._visits[place], None)
            if not self._waiting[place]:
                del self._waiting[place]
                self.active = bool(self._waiting)
            return fault

    def _inject(self, fault: Fault) -> None:
        log.info(f"injected fault {fault}")
        if fault.kind is Kind.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind is Kind.STOP:
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.kind is Kind.EXIT:
            raise InjectedExit(1)
        elif fault.kind is Kind.DEVICE and self._break_device is not None:
            self._break_device()
        else:
            raise InjectedFault(f"injected fault {fault}")
