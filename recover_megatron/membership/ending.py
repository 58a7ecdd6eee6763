"""End of a run because no worker is left or an exception stops all replicas, and the messages that report why.

A fault in the work itself (a microbatch whose gradient is NaN, a bug that iteration 7 triggers) stops every worker that
takes over the work, one replica after the other. The coordinator recognises such a fault by the exceptions that these
workers report. Two workers *share* work if both have tried the same microbatch of one iteration. If they failed outside
of microbatches, they share work if both failed in the same phase of one iteration.

    reported exceptions                                 conclusion
    two replicas, the same error, shared work           the work is faulty: the coordinator ends the run
    three replicas, any errors, the same shared work    the work is faulty: the coordinator ends the run
    all replicas, the same error, one iteration         the work is faulty, and no replica is left
    the last replicas, the same error,
        no microbatch begun, successive iterations      the work is faulty, and no replica is left
    a fault of the host or of the device                none about the work
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from signal import Signals

from recover_megatron.membership.epochs import Epochs
from recover_megatron.membership.events import Close, CoordinatorEvent, Exit, Outbox, Received
from recover_megatron.membership.messages import to_coordinator, to_member
from recover_megatron.membership.records import (
    EXIT_LOST_MAJORITY,
    EXIT_NO_REPLICA,
    EXIT_SAME_FAULT,
    Formed,
    RunOver,
    WorkerId,
    Workers,
    cut_middle,
    to_runs,
)
from recover_megatron.membership.roster import Fate, Member, Roster


@dataclass(frozen=True)
class ExceptionReport:
    """Report of a worker about the exception that terminates it."""

    name: str
    """Worker and host, for messages."""
    group: int
    """Id of the worker's replica. Workers of one replica fail together, so their reports count as one."""
    iteration: int
    microbatch: int | None
    """The last microbatch that the worker began; None: none."""
    error: str
    phase: str = ""
    tried: frozenset[int] = frozenset()
    """Microbatches of the iteration that the worker has begun. Any of them may be the cause: many faults show late (a
    gradient is checked after the pass, a device reports an error at the next synchronisation)."""
    own: bool = False
    """True if the worker's host or device is at fault."""

    def shared(self, other: ExceptionReport) -> frozenset[int | str]:
        """Return the work that two replicas both tried: microbatches, or a phase. Empty if a host is at fault."""
        if self.own or other.own or self.group == other.group or self.iteration != other.iteration:
            return frozenset()
        return self._work & other._work

    @property
    def _work(self) -> frozenset[int | str]:
        return frozenset(self.tried) or frozenset([self.phase])

    def repeats(self, earlier: ExceptionReport) -> bool:
        """Return whether ``earlier`` is a report from another replica about the same error in the same work."""
        return bool(self.shared(earlier)) and alike(self.error) == alike(earlier.error)


_NUMBER = re.compile(r"0x[0-9a-f]+|[-+]?\b(?:nan|inf)\b|[-+]?\d+(?:\.\d*)?(?:e[-+]?\d+)?", re.IGNORECASE)
# A match can only start at the start of a word, so that the search takes linear time.
_NAME_WITH_A_NUMBER = re.compile(r"(?<!\w)\w*#[\w#]*|\btmp\w{6,}")
_OUTAGE = re.compile(
    r"(?:Connection\w*|BrokenPipe|Timeout)Error\b|OSError: .*\[Errno (?:5|107|110|112|113|116|121)\]", re.DOTALL
)
"""Errors of storage that does not answer (EIO, ESTALE, ETIMEDOUT, ...), which all workers may get at the same time."""
_NUMBERS = re.compile(r"#(?:[\s,;:.()\[\]-]*#)+")


def alike(error: str) -> str:
    """Return an error's text without ranks, devices, pids, addresses, values and names that differ between workers."""
    return _NUMBERS.sub("#", _NAME_WITH_A_NUMBER.sub("#", _NUMBER.sub("#", error)))


def true_cause(report: ExceptionReport, earlier: Iterable[ExceptionReport]) -> str | None:
    """Return why the run must end if ``report`` shows the same fault as other replicas' reports, else None."""
    before = [other for other in earlier if report.shared(other)]
    repeated = next((other for other in before if report.repeats(other)), None)
    if repeated is not None:
        same = report.microbatch is not None and report.microbatch == repeated.microbatch
        work = _named(report, frozenset([report.microbatch]) if same else report.shared(repeated))
        prefix = f"{work} fails wherever it is run, on {repeated.name}, then on {report.name}: "
        return f"{prefix}{cut_middle(report.error, 2000 - len(prefix))}"
    for first in before:
        for second in before:
            if work_of_all := report.shared(first) & report.shared(second) & first.shared(second):
                work = _named(report, work_of_all)
                texts = "; ".join(f"{each.name}: {cut_middle(each.error, 400)}" for each in (first, second, report))
                return cut_middle(f"{work} ends every worker that runs it, each with another error: {texts}", 2000)
    return None


def _named(report: ExceptionReport, work: Iterable[int | str | None]) -> str:
    """Return text that names ``work``: microbatches or a phase of the report's iteration."""
    iteration = f"iteration {report.iteration}"
    numbers = sorted(one for one in work if isinstance(one, int))
    if not numbers:
        return f"{iteration} ({report.phase})" if report.phase else iteration
    if len(numbers) == 1:
        return f"microbatch {numbers[0]} of {iteration}"
    more = ", ..." if len(numbers) > 8 else ""
    return f"one of the microbatches {', '.join(map(str, numbers[:8]))}{more} of {iteration}"


class ExceptionReports:
    """First exception report of each worker of a run."""

    def __init__(self, out: Outbox) -> None:
        self._reports: dict[WorkerId, ExceptionReport] = {}
        self._out = out

    def add(self, worker: Member, m: to_coordinator.ReportException) -> str | None:
        """Store a worker's report. Return why the run must end, or None."""
        if worker.number in self._reports:
            return None
        where = {"iteration": m.iteration, "microbatch": m.microbatch, "group": m.group}
        details = {"phase": m.phase, "own": m.own, "error": m.error, "traceback": m.traceback}
        self._out.log("exception", worker=worker.number, host=worker.host, **where, **details)
        # The report is newer than the last heartbeat, so it has the iteration and phase of the failure.
        worker.progress.iteration, worker.progress.phase = m.iteration, m.phase or worker.progress.phase
        tried = frozenset(m.tried) | ({m.microbatch} if m.microbatch is not None else frozenset())
        report = ExceptionReport(worker.name, m.group, m.iteration, m.microbatch, m.error, m.phase, tried, m.own)
        cause = true_cause(report, self._reports.values())
        self._reports[worker.number] = report
        return cause

    def same_of_all(self, workers: Workers) -> str | None:
        """Return the common cause if all ``workers`` and at least two replicas failed with the same error; else None.

        ``workers``: members of the last epoch, none of which is live. There are two cases. Either all workers failed in
        one iteration, perhaps in different microbatches, because no live worker could repeat a microbatch. Or one
        replica failed between two steps, and another replica failed likewise in the next iteration. A storage outage is
        no common cause, because a restarted run may continue after it.
        """
        last = [self._reports[number] for number in workers if number in self._reports]
        newest = max((report.iteration for report in last), default=0)
        reports = [report for report in self._reports.values() if report.iteration == newest]
        if len({report.group for report in reports}) < 2:  # the replicas may have failed in successive iterations
            recent = [report for report in self._reports.values() if report.iteration >= newest - 1]
            reports = [report for report in recent if not report.tried]
        if len(last) < len(workers) or not set(last) <= set(reports):
            return None
        if any(report.own or _OUTAGE.match(report.error) for report in reports):
            return None
        if len({alike(report.error) for report in reports}) > 1 or len({report.group for report in reports}) < 2:
            return None
        both = len({report.iteration for report in reports}) > 1
        which = f"iterations {newest - 1} and {newest} fail" if both else f"iteration {newest} fails"
        return f"{which} in all replicas: {cut_middle(last[-1].error, 1900)}"

    def last_of(self, workers: Workers) -> str:
        """Return the latest error report among ``workers``, as a sentence suffix; empty if there is none."""
        latest = next((self._reports[number] for number in reversed(self._reports) if number in workers), None)
        return f"; {latest.name} reported the last error: {latest.error[:1000]}" if latest else ""


class Ending:
    """Sends the stop message when a run is over: to attached members (``begin``), and to members that attach later.

    The effect ``Exit`` follows when all awaited members have received the message, or at ``deadline``.
    """

    def __init__(self, roster: Roster, out: Outbox) -> None:
        self.deadline = math.inf
        self._roster = roster
        self._out = out
        self._farewell = to_member.Stop("", 0, 0)  # replaced by ``begin``
        self._awaited: set[int | str] = set()  # workers and launchers that must still receive the stop message

    def begin(
        self, over: RunOver, formed: Formed, absent: Workers, patience: float, observers: Iterable[int], now: float
    ) -> None:
        """Send the stop message to all members and to ``observers`` (sessions).

        ``absent``: workers that the open rendezvous needs, and that have no connection. If a worker stopped the run,
        this coordinator waits for them until the time ``patience``. If the run stops for another reason, it does not
        wait for them, because they may continue under another coordinator. Unless another coordinator may continue the
        run, it also waits for launchers that have not attached yet or have just lost their connection, because they
        need the exit code.
        """
        roster, settings = self._roster, self._roster.settings
        code, reason, by = over.code, over.reason, over.by
        if code and (ordered := self._ordered_to_stop(formed)):
            code, reason = ordered
        workers = absent if over.by is not None else Workers()
        nodes: set[str] = set()
        if over.by is not None or code != EXIT_LOST_MAJORITY:
            nodes = {
                w.node_agent for w in roster.workers.values() if w.node_agent and w.node_agent not in roster.node_agents
            }
        until = [patience] * bool(workers) + [now + settings.heartbeat_timeout] * bool(nodes)
        if code != EXIT_LOST_MAJORITY and (lost := self._just_lost(now)):
            nodes |= lost
            until.append(now + 2 * settings.heartbeat_timeout)
        self._awaited = {*workers, *nodes}
        self.deadline = max(until, default=math.inf)
        self._out.log("stop", code=code, reason=reason)
        left = to_runs(roster.with_fate(Fate.LEFT))
        self._farewell = to_member.Stop(reason[:2000], code, formed.epoch, by, left)
        self._out.send([*sorted(roster.sessions), *observers], self._farewell)
        if not self._awaited:
            self._out.do(Exit(code, reason))

    def handle(self, event: CoordinatorEvent, now: float) -> None:
        """Process an event after ``begin``. Send the stop message to observers, and refuse all others.

        While any member is awaited, all members that attach receive the stop message, too.
        """
        waited = bool(self._awaited)
        if isinstance(event, Received):
            message = event.message
            is_hello = isinstance(message, to_coordinator.Hello)
            if isinstance(message, to_coordinator.Observe) or (waited and is_hello):
                self._out.send([event.session], self._farewell)
                self._out.do(Close(event.session))
                self._awaited -= {getattr(message, name, None) for name in ("worker", "node")}
            else:
                self._roster.refuse(event.session, "this coordinator has stopped")
        if waited and (not self._awaited or now >= self.deadline):
            self._awaited.clear()
            self.deadline = math.inf
            self._out.do(Exit(self._farewell.code, self._farewell.reason))

    def _ordered_to_stop(self, formed: Formed) -> tuple[int, str] | None:
        """Return exit code and reason if all launchers with workers in the run were ordered to stop, else None."""
        roster = self._roster
        nodes = {roster.workers[number].node_agent for number in formed.members}
        if formed.epoch == 0:  # a worker that never attached has named no launcher
            nodes = (nodes - {""}) | roster.node_agents.keys()
        node_agents = [roster.node_agents[node] for node in sorted(nodes) if node in roster.node_agents]
        if not nodes or len(node_agents) < len(nodes) or not all(node_agent.stopping for node_agent in node_agents):
            return None
        number = node_agents[0].stopping
        names = ", ".join(node_agent.node for node_agent in node_agents)
        return 128 + number, f"ended by {Signals(number).name}, which the launcher on {names} received"

    def _just_lost(self, now: float) -> set[str]:
        """Return the nodes of launchers without a session that may still be running.

        These launchers have sent a message within ``lost_timeout``.
        """
        since = now - self._roster.settings.lost_timeout
        node_agents = self._roster.node_agents.values()
        return {w.node for w in node_agents if w.session is None and not w.ended and w.heard > since}


@dataclass(eq=False)
class Survivors:
    """Checks, before a rendezvous opens, that live workers hold the run's state."""

    _roster: Roster
    _epochs: Epochs
    _exceptions: ExceptionReports
    _out: Outbox

    def check(self, members: Workers, counted_on: Workers) -> None:
        """Raise RunOver if the run cannot continue, or has finished.

        The run can continue if ``members``, the live workers of ``counted_on``, include members of the last epoch, or
        if set-aside workers may come back. It has finished if no worker with a part in the work is live any more, and
        at least one of them has left normally.
        """
        roster, epochs = self._roster, self._epochs
        required_aside = roster.required_aside | (roster.returning if epochs.own else frozenset())
        if not members & epochs.formed.members and not required_aside:  # newcomers alone hold no state
            if (counted_on - roster.idle(epochs.formed)) & roster.with_fate(Fate.LEFT):
                raise RunOver(0, "all workers have left")
            if same := self._exceptions.same_of_all(epochs.formed.members):
                raise RunOver(EXIT_SAME_FAULT, same)
            left = f"no live worker is left{self._exceptions.last_of(epochs.formed.members)}"
            if members - roster.newcomers | roster.with_fate(Fate.ASIDE):
                left = "the coordinator and all workers that knew the last commit are lost; live workers were set aside"
            raise RunOver(EXIT_NO_REPLICA, left)
        if epochs.finished:
            raise RunOver(0, "all workers with a part in the work have left")

    def required_aside(self, members: Workers) -> Workers:
        """Return the set-aside workers that must ask for a place before the next epoch, in addition to ``members``.

        If no worker with a part in the last epoch is live, only the set-aside workers still hold state of the run. They
        may continue if all other workers are certainly gone. A rendezvous counts on a set-aside worker only after that
        worker has asked for a place. Otherwise the worker would wrongly assume that it was never left out.
        """
        known = self._epochs.own or members & self._epochs.formed.members  # True if the last commit is known
        alone = known and not members & self._epochs.working
        return self._roster.with_fate(Fate.ASIDE) if alone else frozenset()

    def wait_for_heirs(self) -> None:
        """Report that no rendezvous can be opened until a set-aside worker asks for a place."""
        required = self._roster.required_aside
        names = ", ".join(self._roster.workers[number].name for number in sorted(required)[:4])
        text = f"all other workers are lost: the run waits for {names}{' and others' * (len(required) > 4)} (set aside)"
        self._out.log("waits", workers=to_runs(required), reason=text)
        self._out.send(self._roster.node_agent_sessions, to_member.Tell(text[:2000]))
