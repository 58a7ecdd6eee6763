"""The end of a run: whether nobody is left, or nobody can go on for an exception, and how everybody is told why.

A fault that lies in the work itself (a microbatch whose gradient is no number, a bug that iteration 7 meets) ends every
worker that takes the work over: the replicas would be eaten one by one. It is known by its victims. Work that two
workers *share* is a microbatch that both have tried in one iteration, or, outside of microbatches, the same phase.

    two replicas, the same error, shared work           the run ends
    all replicas, the same error, one iteration         the run has ended
    the last replicas in turn, the same error,
        no microbatch begun, two iterations             the run has ended
    three replicas, any errors, the same shared work    the run ends
    a fault of the host or of the device                says nothing about the work
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from signal import Signals
from typing import Any

from recover_megatron.membership.epochs import Epochs
from recover_megatron.membership.events import Close, CoordinatorEvent, Exit, Outbox, Received
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
        microbatch = message.get("microbatch")
        tried = frozenset(message.get("tried", ())) | ({microbatch} if microbatch is not None else frozenset())
        group, iteration, error = message["group"], message["iteration"], message["error"]
        phase, own = message.get("phase", ""), message.get("own", False)
        return ExceptionReport(name, group, iteration, microbatch, error, phase, tried, own)

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
_NAME_WITH_A_NUMBER = re.compile(r"(?<!\w)\w*#[\w#]*|\btmp\w{6,}")  # a match begins at a word: linear time
_OUTAGE = re.compile(
    r"(?:Connection\w*|BrokenPipe|Timeout)Error\b|OSError: .*\[Errno (?:5|107|110|112|113|116|121)\]", re.DOTALL
)
"""An error of storage that does not answer (EIO, ESTALE, ETIMEDOUT, ...), which all may meet at once."""
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
        what = f"{work} fails wherever it is run, on {repeated.name}, then on {report.name}: "
        return f"{what}{cut_middle(report.error, 2000 - len(what))}"
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
        """Keep a worker's report, a checked message; why the run must end, if they tell that nobody can go on."""
        if worker.number in self._reports:
            return None
        report = ExceptionReport.of(worker.name, message)
        where = {"iteration": report.iteration, "microbatch": report.microbatch, "group": report.group}
        said = {"phase": report.phase, "own": report.own, "error": report.error, "traceback": message["traceback"]}
        self._out.log("exception", worker=worker.number, host=worker.host, **where, **said)
        # Its last heartbeat is up to an interval old; this is where it was lost.
        worker.progress.iteration, worker.progress.phase = report.iteration, report.phase or worker.progress.phase
        cause = true_cause(report, self._reports.values())
        self._reports[worker.number] = report
        return cause

    def same_of_all(self, workers: Workers) -> str | None:
        """Why nobody is left, if all of ``workers``, the last, said of one iteration what another replica had said.

        Each may have met it in a microbatch of its own: nobody lived to run one again. Or one replica met it between
        two steps, and another one an iteration later: what ended the first one fell to the next.
        None: it may be chance, or an outage of storage that all read from: a run that is started again may go on.
        """
        last = [self._reports[number] for number in workers if number in self._reports]
        newest = max((report.iteration for report in last), default=0)
        reports = [report for report in self._reports.values() if report.iteration == newest]
        if len({report.group for report in reports}) < 2:  # the loop itself, on each replica in turn
            told = [report for report in self._reports.values() if report.iteration >= newest - 1]
            reports = [report for report in told if not report.tried]
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
        """What the last of ``workers`` said that said anything, as the end of a sentence; empty: none did."""
        said = next((self._reports[number] for number in reversed(self._reports) if number in workers), None)
        return f"; {said.name} was the last to say why: {said.error[:1000]}" if said else ""


class Ending:
    """What a coordinator does once its run is over: it tells all (``begin``), then those that come late (``handle``).

    The effect ``Exit`` follows when everybody has been told that is waited for, or at ``deadline``.
    """

    def __init__(self, roster: Roster, out: Outbox) -> None:
        self.deadline = math.inf
        self._roster = roster
        self._out = out
        self._farewell: dict[str, Any] = {}  # the stop message, once there is one
        self._untold: set[int | str] = set()  # workers and launchers still to get it

    def begin(
        self, over: RunOver, formed: Formed, absent: Workers, patience: float, observers: Iterable[int], now: float
    ) -> None:
        """Tell all members and ``observers`` (sessions).

        Where it is a worker's word, those that have not come to the open rendezvous yet (``absent``) are waited for,
        until ``patience``, and told. (Any other reason may be this coordinator's alone: let them try another.) So are
        launchers that have not come yet, or have just lost their connection: they need the exit code. Not where
        another coordinator may go on.
        """
        roster, settings = self._roster, self._roster.settings
        code, reason = over.code, over.reason
        if code and (told := self._told_to_stop(formed)):
            code, reason = told
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
        self._untold = {*workers, *nodes}
        self.deadline = max(until, default=math.inf)
        self._out.log("stop", code=code, reason=reason)
        self._farewell = {"type": "stop", "code": code, "reason": reason[:2000], "epoch": formed.epoch}
        self._farewell["left"] = to_runs(roster.with_fate(Fate.LEFT))
        if over.by is not None:
            self._farewell["by"] = over.by
        self._out.send([*sorted(roster.sessions), *observers], self._farewell)
        if not self._untold:
            self._out.do(Exit(code, reason))

    def handle(self, event: CoordinatorEvent, now: float) -> None:
        """Any event from now on: tell those who come late, if they are waited for."""
        waited = bool(self._untold)
        if isinstance(event, Received):
            message = event.message
            if message["type"] == "observe" or (waited and message["type"] in ("attach", "attach_node_agent")):
                self._out.send([event.session], self._farewell)
                self._out.do(Close(event.session))
                self._untold -= {message.get("worker"), message.get("node")}
            else:
                self._roster.refuse(event.session, "this coordinator has stopped")
        if waited and (not self._untold or now >= self.deadline):
            self._untold.clear()
            self.deadline = math.inf
            self._out.do(Exit(self._farewell["code"], self._farewell["reason"]))

    def _told_to_stop(self, formed: Formed) -> tuple[int, str] | None:
        """Code and reason of a run whose launchers, all that have workers in it, were told to end them."""
        roster = self._roster
        nodes = {roster.workers[number].node_agent for number in formed.members}
        if formed.epoch == 0:  # a worker that has not come has named no launcher, but that may have come
            nodes = (nodes - {""}) | roster.node_agents.keys()
        node_agents = [roster.node_agents[node] for node in sorted(nodes) if node in roster.node_agents]
        if not nodes or len(node_agents) < len(nodes) or not all(node_agent.stopping for node_agent in node_agents):
            return None
        number = node_agents[0].stopping
        names = ", ".join(node_agent.node for node_agent in node_agents)
        return 128 + number, f"ended by {Signals(number).name}, which the launcher on {names} received"

    def _just_lost(self, now: float) -> set[str]:
        """The launchers that are not reached, but were not long ago, and are not known to have ended."""
        since = now - self._roster.settings.lost_timeout
        node_agents = self._roster.node_agents.values()
        return {w.node for w in node_agents if w.session is None and not w.ended and w.heard > since}


@dataclass(eq=False)
class Survivors:
    """Those who hold the run's state, asked before a rendezvous is opened. Changes nothing but what is sent."""

    _roster: Roster
    _epochs: Epochs
    _exceptions: ExceptionReports
    _out: Outbox

    def check(self, members: Workers, counted_on: Workers) -> None:
        """Raise RunOver where nobody of ``members``, the live of ``counted_on``, and no heir can go on."""
        roster, epochs = self._roster, self._epochs
        heirs = roster.heirs | (roster.returning if epochs.own else frozenset())
        if not members & epochs.formed.members and not heirs:  # newcomers alone have nothing to go on from
            if (counted_on - roster.idle(epochs.formed)) & roster.with_fate(Fate.LEFT):
                raise RunOver(0, "all workers have left")
            if same := self._exceptions.same_of_all(epochs.formed.members):
                raise RunOver(EXIT_SAME_FAULT, same)
            left = f"no live worker is left{self._exceptions.last_of(epochs.formed.members)}"
            if members - roster.newcomers | roster.with_fate(Fate.ASIDE):
                left = "all are lost who know what was committed last, the coordinator too; who lives was aside"
            raise RunOver(EXIT_NO_REPLICA, left)
        if epochs.finished:
            raise RunOver(0, "all workers that had a part in the work have left")

    def heirs(self, members: Workers) -> Workers:
        """The aside: they have to ask for a place before the next epoch, beside ``members`` of the last one.

        Where nobody lives who had a part in that epoch, all that is left of the run's state is what they hold. They
        may go on as any others may: if the rest is gone for certain. No rendezvous counts on one that has not asked:
        it would take it that it was never left out.
        """
        known = self._epochs.own or members & self._epochs.formed.members  # what was committed
        alone = known and not members & self._epochs.working
        return self._roster.with_fate(Fate.ASIDE) if alone else frozenset()

    def wait_for_heirs(self) -> None:
        """Nobody is there to open a rendezvous for, until one asks."""
        heirs = self._roster.heirs
        names = ", ".join(self._roster.workers[number].name for number in sorted(heirs)[:4])
        text = f"all others are lost: the run waits for {names}{' and others' * (len(heirs) > 4)}, set aside before"
        self._out.log("waits", workers=to_runs(heirs), reason=text)
        self._out.send(self._roster.node_agent_sessions, {"type": "tell", "text": text[:2000]})
