"""Exception report: what a worker that is ended by an exception tells, and when they mean that nobody can go on.

A fault that lies in the work itself (a microbatch whose gradient is no number, a bug that iteration 7 meets) ends every
worker that takes the work over: the replicas would be eaten one by one. It is known by its victims. Work that two
workers *share* is a microbatch that both have tried in one iteration, or, outside of microbatches, the same phase.

    two replicas, the same error, shared work       the run ends
    three replicas, any errors, the same shared work      the run ends
    a fault of the host or of the device            says nothing about the work
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from recover_megatron.membership.events import Outbox
from recover_megatron.membership.records import WorkerId, Workers
from recover_megatron.membership.roster import Member

MAX_ERROR = 2000
"""Characters of an error's type and message."""
MAX_TRACEBACK = 16 << 10
"""Characters of a traceback."""
MAX_TRIED = 4096
"""Microbatches that a worker names as those that may have ended it."""


def cut_middle(text: str, limit: int) -> str:
    """At most ``limit`` characters of ``text``: its beginning and its end, which say most of a traceback."""
    if len(text) <= limit:
        return text
    mark = f"\n[... {len(text) - limit} or more characters cut ...]\n"
    head = (limit - len(mark)) // 2
    return text[:head] + mark + text[len(text) - (limit - len(mark) - head) :]


@dataclass(frozen=True)
class ExceptionReport:
    """Why a worker ends, as it says itself."""

    name: str
    """The worker and its host, for people."""
    group: int
    """Its replica: workers of one replica share their fate, and their errors."""
    iteration: int
    microbatch: int | None
    """The one that it had begun last."""
    error: str
    phase: str = ""
    tried: frozenset[int] = frozenset()
    """The microbatches of the iteration that it has begun, any of which may be the cause: many faults show late (a
    gradient is looked at after the pass, a device tells of an error at the next wait)."""
    own: bool = False
    """Whether the fault is one of its host or device."""

    @staticmethod
    def of(name: str, message: Mapping[str, Any]) -> ExceptionReport:
        """Those of a checked message."""
        microbatch = message.get("microbatch")
        tried = frozenset(message.get("tried", ())) | ({microbatch} if microbatch is not None else frozenset())
        return ExceptionReport(
            name,
            message["group"],
            message["iteration"],
            microbatch,
            message["error"],
            message.get("phase", ""),
            tried,
            message.get("own", False),
        )

    def shared(self, other: ExceptionReport) -> frozenset[int | str]:
        """The work that both replicas have met: microbatches or a phase.  Empty: none, or it is not to blame."""
        if self.own or other.own or self.group == other.group or self.iteration != other.iteration:
            return frozenset()
        return self._work & other._work

    @property
    def _work(self) -> frozenset[int | str]:
        return frozenset(self.tried) or frozenset([self.phase])

    def repeats(self, earlier: ExceptionReport) -> bool:
        """Whether another replica ended in the same way at the same work."""
        return bool(self.shared(earlier)) and alike(self.error) == alike(earlier.error)


_NUMBER = re.compile(r"0x[0-9a-f]+|[-+]?\b(?:nan|inf)\b|[-+]?\d+(?:\.\d*)?(?:e[-+]?\d+)?", re.IGNORECASE)
_NAME_WITH_A_NUMBER = re.compile(r"\w*#[\w#]*|\btmp\w{6,}")
_NUMBERS = re.compile(r"#(?:[\s,;:.()\[\]-]*#)+")


def alike(error: str) -> str:
    """An error without what is the worker's or the moment's: ranks, devices, process ids, addresses, values, names."""
    return _NUMBERS.sub("#", _NAME_WITH_A_NUMBER.sub("#", _NUMBER.sub("#", error)))


def true_cause(report: ExceptionReport, earlier: Iterable[ExceptionReport]) -> str | None:
    """Why the run must end: ``report`` tell of the same fault as those of other replicas.  None: they do not."""
    before = [other for other in earlier if report.shared(other)]
    repeated = next((other for other in before if report.repeats(other)), None)
    if repeated is not None:
        same = report.microbatch is not None and report.microbatch == repeated.microbatch
        work = _named(report, frozenset([report.microbatch]) if same else report.shared(repeated))
        victims = f"on {repeated.name}, then on {report.name}"
        room = 2000 - len(work) - len(victims) - 50
        return f"{work} raises {cut_middle(report.error, room)} wherever it is run: {victims}"
    for first in before:
        for second in before:
            if work_of_all := report.shared(first) & report.shared(second) & first.shared(second):
                work = _named(report, work_of_all)
                told = "; ".join(f"{each.name}: {cut_middle(each.error, 400)}" for each in (first, second, report))
                return cut_middle(f"{work} ends every worker that runs it, each by another error: {told}", 2000)
    return None


def _named(report: ExceptionReport, work: Iterable[int | str | None]) -> str:
    """Of work of one iteration, for people."""
    iteration = f"iteration {report.iteration}"
    numbers = sorted(one for one in work if isinstance(one, int))
    if not numbers:
        return f"{iteration} ({report.phase})" if report.phase else iteration
    if len(numbers) == 1:
        return f"microbatch {numbers[0]} of {iteration}"
    more = ", ..." if len(numbers) > 8 else ""
    return f"one of the microbatches {', '.join(map(str, numbers[:8]))}{more} of {iteration}"


class ExceptionReports:
    """What the workers of a run have said that exceptions ended, each once."""

    def __init__(self, out: Outbox) -> None:
        self._reports: dict[WorkerId, ExceptionReport] = {}
        self._out = out

    def add(self, worker: Member, message: Mapping[str, Any]) -> str | None:
        """Keep a worker's exception report, a checked message; why the run must end, if they tell that nobody can go
        on.
        """
        if worker.number in self._reports:
            return None
        report = ExceptionReport.of(worker.name, message)
        where = {"iteration": report.iteration, "microbatch": report.microbatch, "group": report.group}
        said = {"phase": report.phase, "own": report.own, "error": report.error, "traceback": message["traceback"]}
        self._out.log("exception", worker=worker.number, host=worker.host, **where, **said)
        cause = true_cause(report, self._reports.values())
        self._reports[worker.number] = report
        return cause

    def last_of(self, workers: Workers) -> str:
        """What the last of ``workers`` said that said anything, as the end of a sentence; empty: none did."""
        said = next((self._reports[number] for number in reversed(self._reports) if number in workers), None)
        return f"; {said.name} was the last to say why: {said.error[:1000]}" if said else ""
