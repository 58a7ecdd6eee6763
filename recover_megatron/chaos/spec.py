"""Faults that a worker injects into itself at a named phase of a step: ``WORKER@ITERATION:PHASE[#VISIT][:KIND]``, ...

5@7:backward                  worker 5 is killed in its first backward of iteration 7
5@7:forward#2:stop,0@9:agree  worker 5 hangs in its second forward of iteration 7; worker 0 is killed in iteration 9
"""

from __future__ import annotations

import enum
import os
import re
import signal
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from recover_megatron.errors import UserError
from recover_megatron.logger import get_logger

PHASES = (
    "data",
    "forward",
    "backward",
    "reduce-scatter",
    "all-gather",
    "shadow",
    "agree",
    "optimizer",
    "norm",
    "update",
    "param-gather",
    "eval",
    "checkpoint",
    "recovery",
    "regroup",
    "transfer",
    "repartition",
    "rollback",
    "snapshot",
)
"""Phases in which a fault can strike: first the phases of an iteration, in their order; then phases of other events.

recovery   at any point while the survivors finish a step after a loss
regroup    when a worker gets a place: after its process groups have been created (visit 1), and after it has received
           its state (visit 2).  ITERATION is the first iteration of the new replica
transfer   a worker begins to send its state to another worker, in the first iteration of the new replica
rollback   before a checkpoint is loaded in place (visit 1), and after (visit 2).  ITERATION is the first iteration
           after the checkpoint
snapshot   a snapshot for the memory tier is copied but not yet sent (visit 1); this worker has received all copies that
           it must hold (visit 2)

With the distributed optimizer:

shadow       this worker has stored a finished sum that another worker sent (visited just after all-gather)
norm         before the gradient norms are exchanged
update       before the parameters and the optimizer's state are updated (visit 1), and after (visit 2)
param-gather updated parameters have arrived
repartition  before workers exchange optimizer state (visit 1), and after (visit 2)
"""

_SHAPE = re.compile(r"(\d+)@(\d+):([^:#@]+)(?:#(\d+))?(?::([^:#@]+))?", re.ASCII)


class Kind(enum.StrEnum):
    """Effect of a fault on the worker."""

    KILL = "kill"
    """SIGKILL to the worker."""
    STOP = "stop"
    """SIGSTOP to the worker: it hangs, but its sockets stay open."""
    RAISE = "raise"
    """InjectedFault, an exception, is raised in the worker."""
    EXIT = "exit"
    """sys.exit(1) in the worker."""
    DEVICE = "device"
    """A failed assertion in a CUDA kernel makes the worker's device unusable; without a device, the effect is RAISE."""


@dataclass(frozen=True)
class Fault:
    """Fault of one worker: it has the effect ``kind`` at the ``visit``-th visit of ``phase`` in ``iteration``."""

    worker: int
    iteration: int
    """Counted from 1."""
    phase: str
    kind: Kind = Kind.KILL
    visit: int = 1
    """Counted from 1.  A worker may visit a phase several times in an iteration: ``forward`` once per microbatch."""

    def __str__(self) -> str:
        visit = f"#{self.visit}" if self.visit > 1 else ""
        return f"{self.worker}@{self.iteration}:{self.phase}{visit}:{self.kind}"


class BadSpec(UserError, ValueError):
    """Error for an invalid specification of faults; ``reasons`` lists all mistakes."""


def parse_spec(text: str, workers: int | None = None) -> list[Fault]:
    """Return the faults in the order of ``text``.  Raises BadSpec (a ValueError) with all mistakes.

    ``workers``: number of workers, to check the worker ids; None to accept every worker id.
    """
    faults: list[Fault] = []
    reasons: list[str] = []
    for item in text.split(",") if text.strip() else []:
        fault, found = _parse_fault(item.strip(), workers)
        reasons += found
        if fault is None:
            continue
        twin = next((old for old in faults if _place(old) == _place(fault)), None)
        if twin is not None:
            reasons.append(f"{item.strip()!r}: {str(twin)!r} already strikes the same worker at the same place")
        faults.append(fault)
    if reasons:
        raise BadSpec(*(f"fault {reason}" for reason in reasons))
    return faults


def _place(fault: Fault) -> tuple[int, int, str, int]:
    return fault.worker, fault.iteration, fault.phase, fault.visit


def _parse_fault(item: str, workers: int | None) -> tuple[Fault | None, list[str]]:
    """Return (fault, empty list) if ``item`` is valid, otherwise (None, the mistakes as texts)."""
    match = _SHAPE.fullmatch(item)
    if match is None:
        return None, [f"{item!r}: not of the form WORKER@ITERATION:PHASE[#VISIT][:KIND], like 5@7:backward:kill"]
    worker, iteration, phase, visit, kind = match.groups()
    reasons = []
    if workers is not None and int(worker) >= workers:
        reasons.append(f"{item!r}: there is no worker {worker}; the workers are 0 to {workers - 1}")
    if int(iteration) < 1:
        reasons.append(f"{item!r}: iterations count from 1")
    if phase not in PHASES:
        reasons.append(f"{item!r}: unknown phase {phase!r}; the phases are {', '.join(PHASES)}")
    if visit is not None and int(visit) < 1:
        reasons.append(f"{item!r}: visits count from 1")
    if kind is not None and kind not in list(Kind):
        reasons.append(f"{item!r}: unknown kind {kind!r}; the kinds are {', '.join(Kind)}")
    if reasons:
        return None, reasons
    return Fault(int(worker), int(iteration), phase, Kind(kind or "kill"), int(visit or 1)), []


log = get_logger(__name__)


class InjectedFault(RuntimeError):
    """Exception of a fault of kind ``raise``."""


class InjectedExit(SystemExit):
    """Exception of a fault of kind ``exit``."""


class Injector:
    """Injector of the faults of one worker.  Call ``at`` at every visit of a phase."""

    def __init__(self, faults: Iterable[Fault], worker: int, break_device: Callable[[], None] | None = None) -> None:
        """Select the faults of ``worker``.

        ``break_device``: function that makes the worker's CUDA device unusable; None if it has no device.
        """
        self._waiting: dict[tuple[str, int], dict[int, Fault]] = {}
        for fault in faults:
            if fault.worker == worker:
                self._waiting.setdefault((fault.phase, fault.iteration), {})[fault.visit] = fault
        self._visits = dict.fromkeys(self._waiting, 0)
        self._break_device = break_device
        self._lock = threading.Lock()  # with several buckets in flight, several threads may visit a phase at once
        self.active = bool(self._waiting)
        """True if a fault of this worker has not struck yet.  If false, calls of ``at`` have no effect."""

    def at(self, phase: str, iteration: int) -> None:
        """Count a visit of ``phase`` in ``iteration`` (counted from 1); inject the fault of this visit, if any.

        ``kill`` does not return.  ``stop`` returns when the process receives SIGCONT.  ``raise`` raises InjectedFault,
        ``exit`` raises SystemExit, both in the calling thread.  ``device`` returns, and the next CUDA call fails; if
        this worker has no device, it raises InjectedFault.
        """
        if not self.active or (phase, iteration) not in self._waiting:
            return
        fault = self._visit(phase, iteration)
        if fault is not None:
            self._inject(fault)

    def _visit(self, phase: str, iteration: int) -> Fault | None:
        with self._lock:
            place = phase, iteration
            if place not in self._waiting:
                return None  # another thread has injected the last fault of this phase
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
