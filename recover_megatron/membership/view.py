"""Views for observers: the coordinator's state as one bounded JSON object, and the history that views contain.

    observer                                  coordinator
       |  (challenge, auth, proof: see ``network``)|
       |  observe  ------------------------------> |
       |  <------------------------------  view    |   a pure function of the state
       |  observe ...                              |
       |  <------------------------------  stop    |   instead of a view, if the run has ended

An observer is no member: no worker waits for it, and it counts in no quorum. Its messages change only
``Observing.sessions``, except that ``drain`` also requests a drain (``drains``). The cost is bounded: an observer that
asks again within ``PAUSE_SECONDS`` is refused, there are at most ``MAX_OBSERVERS`` (a new one replaces the one that was
silent the longest), a view lists at most ``MAX_ROWS`` workers, and long texts in a view are cut. So a view fits
``wire.MAX_TO_MEMBER``, whatever the members have sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from recover_megatron.membership.detect import Stall
from recover_megatron.membership.drains import Drains
from recover_megatron.membership.epochs import Epochs, Rendezvous
from recover_megatron.membership.events import Close, Outbox, State
from recover_megatron.membership.leadership import Leadership
from recover_megatron.membership.messages import fields, to_coordinator, to_member
from recover_megatron.membership.records import Json, WorkerId, to_runs
from recover_megatron.membership.roster import Fate, Member, Roster

PAUSE_SECONDS = 0.4
"""An observer that asks again within this many seconds is refused."""
MAX_OBSERVERS = 8
MAX_ROWS = 8192
"""Maximum number of workers in one view. If there are more, live workers are left out first."""
LAST = 10
"""Maximum number of faults, and of recoveries, that a coordinator remembers."""

_NAME, _PHASE, _NOTE, _WHY, _REASON = 64, 32, 120, 160, 600  # maximum characters; JSON may need 6 bytes for each
_NUMBERS = ("replica", "position", "slot", "at", "iteration", "total", "quota", "device")
_TEXTS = {"note": _NOTE, "node": _NAME}
_FAULTS = ("fault", "exception", "stuck", "give_up")


class History:
    """Data that only views need: when and why workers ended, the last faults and recoveries, and the last commit.

    It is built from the records of the event log. A coordinator that took over knows only events since its takeover.
    """

    def __init__(self) -> None:
        self.faults: deque[tuple[float, dict[str, Json]]] = deque(maxlen=LAST)
        self.recoveries: deque[tuple[float, dict[str, Json]]] = deque(maxlen=LAST)
        self.committed_at: float | None = None
        self.ends: dict[WorkerId, tuple[float, str]] = {}
        """Worker -> time and reason of its end, or of being set aside, or of the exception that will end it."""
        self.evicted: set[WorkerId] = set()
        """Evicted workers. A view still shows them as evicted after their launchers have killed them."""
        self.replicas: set[int] = set()
        """Ids of all replicas that were in any plan."""
        self.replica_size = 0
        """Number of workers of a complete replica: the most that a replica had in any plan."""
        self._reasons: list[str] = []

    def note(self, record: Mapping[str, Json], plan: Json, now: float) -> None:
        """Update the history from one record of the event log; ``plan``: the data of the last plan."""
        event = record["event"]
        if event in _FAULTS:
            self._fault(event, record, now)
        if event == "commit":
            self.committed_at = now
        elif event == "left":
            self.ends[record["worker"]] = (now, record["reason"])
        elif event == "aside":
            self.ends[record["worker"]] = (now, _cut(f"set aside, and may come back: {record['reason']}", _WHY))
        elif event == "back":
            self.ends.pop(record["worker"], None)
        elif event == "revoke":
            self._reasons.append(record["reason"])
        elif event == "plan":
            self._plan(record, plan, now)

    def _fault(self, event: str, record: Mapping[str, Json], now: float) -> None:
        kind = record["kind"] if event == "fault" else event
        why = record.get("reason") or record.get("error") or "no reason given"
        if event == "stuck":
            why = f"all workers wait for each other in epoch {record['epoch']}"
        fault = {"kind": kind, "worker": record.get("worker"), "host": _cut(record.get("host", ""), _NAME)}
        self.faults.append((now, {**fault, "why": _cut(why, _REASON)}))
        if kind == "out":
            self.evicted.add(record["worker"])
        if event in ("fault", "exception"):
            # An exception is reported before the connection ends, and an eviction before the process ends, so the first
            # reason is the cause.
            since, before = self.ends.get(record["worker"], (now, ""))
            self.ends[record["worker"]] = (since, _cut(f"{before}; {why}" if before else why, _WHY))

    def _plan(self, record: Mapping[str, Json], plan: Json, now: float) -> None:
        replicas: dict[int, set[Any]] = {}
        for worker, status in _numbered(plan):
            fields: dict[str, Any] = status if isinstance(status, dict) else {}
            replica, position = fields.get("replica"), fields.get("position")
            if replica is not None and _is_number(replica):
                replicas.setdefault(replica, set()).add(position if _is_number(position) else f"of {worker}")
        self.replicas |= replicas.keys()
        self.replica_size = max([self.replica_size, *map(len, replicas.values())])
        reason, self._reasons = _cut("; ".join(self._reasons[:4]), _REASON), []
        workers = sum(last - first + 1 for first, last in record["members"])
        recovery = {"epoch": record["epoch"], "reason": reason, "workers": workers, "committed": record["committed"]}
        self.recoveries.append((now, {**recovery, "seconds": record["seconds"]}))


def statuses_of(plan: Json) -> dict[WorkerId, Mapping[str, Json]]:
    """Return member of a plan -> status, truncated to the size limit; empty if the plan's data has no statuses."""
    return {worker: _bounded(status) for worker, status in _numbered(plan)}


def _numbered(plan: Json) -> Iterator[tuple[WorkerId, Json]]:
    """Yield member and status of a plan, whose data may be anything."""
    statuses = plan.get("statuses") if isinstance(plan, dict) else None
    for worker, status in statuses.items() if isinstance(statuses, dict) else ():
        if worker.isdecimal() and len(worker) < 10:
            yield WorkerId(int(worker)), status


def _is_number(value: Json) -> bool:
    return type(value) is int and abs(value) < 1 << 53


def _bounded(status: Json) -> dict[str, Json]:
    """Return the fields of a status that a view shows, cut to size. Fields with values of a wrong type are left out."""
    if not isinstance(status, dict):
        return {}
    numbers = {name: status[name] for name in _NUMBERS if _is_number(status.get(name))}
    texts = {name: _cut(status[name], limit) for name, limit in _TEXTS.items() if isinstance(status.get(name), str)}
    nothing = {"replica": None} if "replica" in status and status["replica"] is None else {}
    return {**numbers, **texts, **nothing}


@dataclass(eq=False)
class Observing:
    """Observers of one coordinator, and the views that they get. Their only request that changes the run is a drain."""

    _roster: Roster
    _leadership: Leadership
    _epochs: Epochs
    _rendezvous: Rendezvous
    _stall: Stall
    _drains: Drains
    _out: Outbox
    history: History = field(default_factory=History, init=False)
    """Receives every record of the event log."""
    sessions: dict[int, float] = field(default_factory=dict, init=False)
    """Session -> time of its last request, oldest first."""

    def asked(self, session: int, message: to_coordinator.ToCoordinator, state: State, now: float) -> None:
        """Apply an observer's request for a drain, and answer with a view; refuse an observer that asks too often."""
        last = self.sessions.pop(session, None)
        if last is not None and now - last < PAUSE_SECONDS:
            self._roster.refuse(session, "this observer asks too often")
            return
        self.sessions[session] = now
        if isinstance(message, to_coordinator.Drain) and state is not State.STANDBY and not self._is_taking_over:
            self._drains.ask(message.node, begun=self._epochs.own)
        self._out.send([session], self.view(state, now))
        if len(self.sessions) > MAX_OBSERVERS:
            quietest = next(iter(self.sessions))
            del self.sessions[quietest]
            self._out.do(Close(quietest))

    @property
    def _is_taking_over(self) -> bool:
        """True if the run has begun, and this coordinator has not formed an epoch of it yet.

        Until then it may not know which drains the members have accepted.
        """
        return self._epochs.formed.epoch > 0 and not self._epochs.own

    def view(self, state: State, now: float) -> to_member.View:
        """Return the message that describes the run. ``state``: state of the coordinator."""
        epochs, history, stall, workers = self._epochs, self.history, self._stall, self._roster.workers
        statuses = statuses_of(epochs.plan)
        gone_first = sorted(workers.values(), key=lambda worker: (worker.fate is Fate.LIVE, worker.number))
        shown = sorted(gone_first[:MAX_ROWS], key=lambda worker: worker.number)
        stalled = None
        if stall.reported and stall.since is not None:
            shown_late = sorted(stall.waited)[:LAST]
            stalled = {
                "seconds": _ago(stall.since, now),
                "left": None if (left := stall.ends_in(now)) is None else round(left, 3),
                "workers": to_runs(stall.waited)[:MAX_ROWS],
                "where": [_cut(f"{workers[n].name}: {stall.waited[n]}", _WHY) for n in shown_late],
            }
        return to_member.View(
            state=state.value,
            term=self._leadership.term,
            epoch=epochs.formed.epoch,
            opened=self._rendezvous.opened.epoch,
            committed=epochs.committed,
            launched=self._roster.world,
            world=len(workers),
            live=sum(worker.fate is Fate.LIVE for worker in workers.values()),
            replicas=to_runs(replica for replica in history.replicas if replica >= 0)[:MAX_ROWS],
            replica_size=history.replica_size,
            workers=[self._row(worker, statuses.get(worker.number), now) for worker in shown],
            hidden=len(workers) - len(shown),
            faults=_dated(history.faults, now),
            recoveries=_dated(history.recoveries, now),
            stall=stalled,
            commit_age=None if history.committed_at is None else _ago(history.committed_at, now),
            drains=self._drains.rows(),
        )

    def _row(self, worker: Member, status: Mapping[str, Json] | None, now: float) -> dict[str, Json]:
        progress, epoch = worker.progress, self._epochs.formed.epoch
        row: dict[str, Json] = {
            "worker": worker.number,
            "fate": "out" if worker.number in self.history.evicted else worker.fate.value,
            "host": _cut(worker.host, _NAME),
            "node": _cut(worker.node_agent, _NAME),
        }
        if worker.fate is not Fate.LIVE:
            since, why = self.history.ends.get(worker.number, (None, "reported by the previous coordinator"))
            seen = {"phase": _cut(progress.phase, _PHASE), "iteration": progress.iteration} if progress.phase else {}
            return {**row, "why": why, **seen} | ({} if since is None else {"ago": _ago(since, now)})
        if worker.session is not None:
            row |= {"silence": _ago(worker.heard, now), "marked": _ago(progress.marked, now)}
        if progress.waiting_since is not None:
            row["waiting"] = _ago(progress.waiting_since, now)
        if progress.microbatch is not None:
            row["microbatch"] = progress.microbatch
        if progress.place is not None:
            row["place"] = progress.place
        if progress.loss is not None:
            row["loss"] = progress.loss
        return {
            **row,
            "iteration": progress.iteration,
            "phase": _cut(progress.phase, _PHASE),
            "done": worker.done,
            "member": worker.number in self._epochs.formed.members and epoch > 0,
            "joined": worker.joined == self._rendezvous.opened.epoch > 0,
            "idle": worker.idle_in == epoch > 0,
            "status": status or _bounded(worker.status),
        }


def _dated(entries: Iterable[tuple[float, dict[str, Json]]], now: float) -> fields.Rows:
    return [{"ago": _ago(at, now), **entry} for at, entry in entries]


def _ago(then: float, now: float) -> float:
    return round(max(0.0, now - then), 3)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
