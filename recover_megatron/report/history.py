"""Faults of a run and their cost, from the event files (docs/reference/events.md has their schema).

A recovery is one change of the membership after the start: a plan of a new epoch, the deaths that led to it, the
microbatches that were run again, and the time of each phase.  The data come from different writers: the coordinator
reports when and why a worker was lost, the workers report the cost, and fault injection reports the injected faults.
Epoch numbers start again with each launch, so events of several launches into one folder (a resumed run) are separated.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from recover_megatron.run_log.events import Event

PHASES = ("detect", "rendezvous", "regroup", "pull", "rerun", "reduce", "agree")
"""Phases of a recovery, in order.  ``detect``: from the injection of a fault until the coordinator detects it."""


@dataclass(frozen=True)
class RecoveryRecord:
    time: float
    """Time of the first fault or, if the coordinator reported no fault, of the plan; unix seconds."""
    launch: int = 0
    """Index of the launch into this folder, from 0."""
    epoch: int | None = None
    """Epoch that the plan began; None: no plan followed the fault."""
    iteration: int | None = None
    """Iteration of the recovery; None: not reported."""
    phase: str = ""
    """Phases of the step in which the workers were interrupted, separated by commas."""
    fresh: tuple[int, ...] = ()
    """Replicas that this epoch formed."""
    lost_workers: tuple[int, ...] = ()
    lost_replicas: tuple[int, ...] = ()
    causes: tuple[str, ...] = ()
    """Causes as texts for the reader."""
    replicas: int | None = None
    """Number of replicas in the new epoch; None: not reported."""
    reran: int = 0
    """Microbatches that were run again."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Phase -> seconds (the longest time that a worker reported), in the order of `PHASES`, other phases last."""
    total: float = 0.0
    """Sum of the phases except ``detect``, in seconds: from the notification of the workers to the step's end."""


@dataclass(frozen=True)
class History:
    """History of a run from its event files."""

    launches: int
    start: Event | None
    """Last start that a worker reported."""
    recoveries: list[RecoveryRecord]
    """Recoveries in the order of time."""
    quotas: list[Event]
    """Events of quotas that were changed because of measured speeds."""
    others: list[Event]
    """Events of rollbacks, repeated sections (``again``) and abandoned checkpoints."""
    end: str
    """End of the run, in words."""
    good_end: bool | None
    """True if the run finished, False if it was stopped; None: no end was reported."""

    @property
    def workers_lost(self) -> int:
        """Return the number of workers lost in all launches; losses that no plan followed do not count."""
        return len({(r.launch, worker) for r in self.recoveries if r.epoch is not None for worker in r.lost_workers})

    @property
    def losses(self) -> int:
        """Return the number of recoveries after a loss of workers; the other recoveries only admitted workers."""
        return sum(r.epoch is not None and bool(r.lost_workers) for r in self.recoveries)

    @property
    def seconds(self) -> float:
        """Return the time spent in all recoveries."""
        return sum(recovery.total for recovery in self.recoveries)


def history(workers: Sequence[Event], coordinators: Sequence[Event], chaos: Sequence[Event]) -> History:
    """Build the history from events in time order; an invalid event raises KeyError, TypeError or AttributeError."""
    starts = _launches(workers, coordinators)
    recoveries = []
    for number, begin in enumerate(starts):
        end = starts[number + 1] if number + 1 < len(starts) else math.inf
        parts = ([event for event in group if begin <= event["time"] < end] for group in (workers, coordinators, chaos))
        recoveries += _recoveries(number, *parts)
    reported, good = _end(workers, coordinators, starts[-1])
    return History(
        launches=len(starts),
        start=next((event for event in reversed(workers) if event["event"] == "start"), None),
        recoveries=sorted(recoveries, key=lambda recovery: recovery.time),
        quotas=_distinct((event for event in workers if event["event"] == "quotas"), "quotas"),
        others=[
            *(event for event in workers if event["event"] == "rolled back"),
            *_distinct((event for event in workers if event["event"] == "again"), "what"),
            *_distinct((event for event in workers if event["event"] == "checkpoint abandoned"), "event"),
        ],
        end=reported,
        good_end=good,
    )


def _launches(workers: Sequence[Event], coordinators: Sequence[Event]) -> list[float]:
    """Return the time at which each launch's events begin, in order; minus infinity for the first launch."""
    listening: dict[str, set[float]] = {}  # a candidate logs this event once per launch; copies have the same time
    for event in coordinators:
        if event["event"] == "listening":
            listening.setdefault(event.get("file", ""), set()).add(event["time"])
    if listening:
        fullest = max(listening.values(), key=len)
        return [-math.inf, *sorted(fullest)[1:]]
    starts, running = [-math.inf], False
    for event in workers:
        if event["event"] == "start" and running:
            starts.append(event["time"])
        running = event["event"] != "start"
    return starts


def _recoveries(
    launch: int, workers: Sequence[Event], coordinators: Sequence[Event], chaos: Sequence[Event]
) -> list[RecoveryRecord]:
    """Return the recoveries of launch number ``launch``, whose events are given."""
    reported: dict[int, list[Event]] = {}
    for event in workers:
        if event["event"] in ("plan", "recovery"):
            reported.setdefault(event["epoch"], []).append(event)
    decided = {event["epoch"]: event for event in coordinators if event["event"] == "plan"}
    epochs = sorted(reported.keys() | decided.keys())
    faults = [{**event, "strike": _strike(event, chaos)} for event in coordinators if event["event"] == "fault"]
    revokes = [event for event in coordinators if event["event"] == "revoke"]
    # A fault belongs to the first plan after it.
    times = [decided[epoch]["time"] if epoch in decided else reported[epoch][0]["time"] for epoch in epochs]
    by_plan: dict[int, list[Event]] = {}
    for fault in faults:
        by_plan.setdefault(bisect_right(times, fault["time"]), []).append(fault)
    recoveries = []
    for place, epoch in enumerate(epochs):
        reasons = [event.get("reason", "") for event in revokes if event["epoch"] == epoch]
        recovery = _recovery(
            launch, epoch, times[place], reported.get(epoch, []), decided.get(epoch), by_plan.get(place, []), reasons
        )
        started = place == 0 and not recovery.lost_workers and not recovery.lost_replicas and not recovery.reran
        if not started:
            recoveries.append(recovery)
    for fault in by_plan.get(len(epochs), []):  # no plan followed
        lost, causes = (fault["worker"],), (_cause(fault),)
        recoveries.append(
            RecoveryRecord(fault["time"], launch, lost_workers=lost, causes=causes, seconds=_detect([fault]))
        )
    return recoveries


def _recovery(
    launch: int,
    epoch: int,
    planned: float,
    reported: Sequence[Event],
    decided: Event | None,
    faults: Sequence[Event],
    reasons: Sequence[str],
) -> RecoveryRecord:
    plans = [event for event in reported if event["event"] == "plan"]
    finished = [event for event in reported if event["event"] == "recovery"]
    plan: Mapping[str, Any] = plans[0] if plans else {}
    lost = set(plan.get("lost_workers", ())) | {fault["worker"] for fault in faults}
    parts: dict[str, float] = _longest([decided] if decided else [], ("rendezvous",))
    parts |= _longest(plans) | _longest(finished)
    total = sum(parts.values())
    parts |= _detect(faults)
    order = [*PHASES, *(name for name in parts if name not in PHASES)]
    account = max(finished, key=lambda event: sum(event["seconds"].values()), default=None)
    iterations = [event["iteration"] for event in (*finished, *plans)]
    if decided is not None and "committed" in decided:
        # Used if no worker reported the iteration: the iteration after the last commit.
        iterations.append(decided["committed"] + 1)
    worker_phases = dict.fromkeys(event["phase"] for event in plans if event.get("phase"))
    return RecoveryRecord(
        time=faults[0]["time"] if faults else planned,
        launch=launch,
        epoch=epoch,
        iteration=iterations[0] if iterations else None,
        phase=", ".join(worker_phases),
        fresh=tuple(sorted(plan.get("fresh", ()))),
        lost_workers=tuple(sorted(lost)),
        lost_replicas=tuple(sorted(plan.get("lost_replicas", ()))),
        causes=tuple(_cause(fault) for fault in faults) or tuple(reason for reason in reasons if reason),
        replicas=len(plan["replicas"]) if "replicas" in plan else None,
        reran=sum(len(ids) for ids in account["reran"].values()) if account else 0,
        seconds={name: parts[name] for name in order if name in parts},
        total=total,
    )


def _longest(events: Iterable[Event], only: Sequence[str] = ()) -> dict[str, float]:
    """Return phase -> the longest time, in seconds, that an event reports; ``only``: phases to return (empty: all)."""
    longest: dict[str, float] = {}
    for event in events:
        for name, seconds in event.get("seconds", {}).items():
            if not only or name in only:
                longest[name] = max(longest.get(name, 0.0), float(seconds))
    return longest


def _strike(fault: Event, chaos: Sequence[Event]) -> Event | None:
    """Return the last injected fault of the worker before ``fault``, its cause; None if none was injected."""
    strikes = [event for event in chaos if event["event"] == "strike" and event["worker"] == fault["worker"]]
    return next((event for event in reversed(strikes) if event["time"] <= fault["time"]), None)


def _detect(faults: Iterable[Event]) -> dict[str, float]:
    waits = [fault["time"] - fault["strike"]["time"] for fault in faults if fault["strike"] is not None]
    return {"detect": max(waits)} if waits else {}


def _cause(fault: Event) -> str:
    strike = fault["strike"]
    host = f" on {fault['host']}" if fault.get("host") else ""
    injected = f" (chaos: {strike['kind']})" if strike else ""
    return f"worker {fault['worker']}{host}: {fault.get('reason', fault.get('kind', ''))}{injected}"


def _distinct(events: Iterable[Event], field: str) -> list[Event]:
    """Drop events with the iteration and the ``field`` of an earlier event: several workers may report the same."""
    seen: dict[tuple[int, str], Event] = {}
    for event in events:
        seen.setdefault((event["iteration"], str(event.get(field))), event)
    return list(seen.values())


def _end(workers: Sequence[Event], coordinators: Sequence[Event], since: float) -> tuple[str, bool | None]:
    stops = [event for event in coordinators if event["event"] == "stop" and event["time"] >= since]
    ends = [event for event in workers if event["event"] == "end" and event["time"] >= since]
    if bad := [event for event in stops if event.get("code")]:
        return f"stopped with exit code {bad[-1]['code']}: {bad[-1].get('reason', '')}", False
    if ends:
        return f"finished after iteration {max(event['iteration'] for event in ends)}", True
    if stops:
        return f"finished: {stops[-1].get('reason', '')}", True
    return "no end was recorded: the run continues, or all its processes were killed", None
