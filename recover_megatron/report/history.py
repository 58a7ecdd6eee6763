"""Faults of a run and their cost, from the event files (docs/reference/events.md has their schema).

A recovery is one change of the membership after the start: a plan of a new epoch, the deaths that led to it, the
microbatches that were run again, and the time of each phase.  The coordinator reports when and why a worker was lost,
the workers report the cost, and fault injection reports the injected faults.  A resumed run has several launches in one
folder.  Epoch numbers start again with each launch, so the events of each launch are treated separately.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from recover_megatron.run_log.events import Event

PHASES = ("detect", "rendezvous", "regroup", "pull", "rerun", "reduce", "agree")
"""Phases of a recovery, in order.  ``detect`` lasts from the injection of a fault until the coordinator detects it."""


@dataclass(frozen=True)
class RecoveryRecord:
    time: float
    """Unix seconds of the first fault or, if the coordinator reported no fault, of the plan."""
    launch: int = 0
    """Number of the launch among all launches into the folder, from 0."""
    epoch: int | None = None
    """Epoch that began with the recovery's plan; None if no plan followed the fault."""
    iteration: int | None = None
    """Iteration that the recovery interrupted; None if it is not known."""
    phase: str = ""
    """Phases of the step in which the surviving workers were interrupted, separated by commas."""
    fresh: tuple[int, ...] = ()
    """Numbers of the replicas that were newly formed in this epoch."""
    lost_workers: tuple[int, ...] = ()
    lost_replicas: tuple[int, ...] = ()
    causes: tuple[str, ...] = ()
    """Causes of the recovery, as texts for the reader: one per lost worker, or the reasons of the new epoch."""
    replicas: int | None = None
    """Number of replicas in the new epoch; None if it is not known."""
    reran: int = 0
    """Number of microbatches that were run again."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Phase -> longest reported time, in seconds; in the order of `PHASES`, then other phases."""
    total: float = 0.0
    """Sum of all phases except ``detect``, in seconds: from the notification of the workers to the step's end."""


@dataclass(frozen=True)
class History:
    """Recoveries, other changes and end of a run, from its event files."""

    launches: int
    start: Event | None
    """Last event ``start`` of the workers; None if there is none."""
    recoveries: list[RecoveryRecord]
    """Recoveries in the order of time."""
    quotas: list[Event]
    """Events about quotas that were changed to balance the measured speeds of the replicas."""
    others: list[Event]
    """Events of rollbacks, repeated sections (``again``) and abandoned checkpoints."""
    end: str
    """Text about the end of the run."""
    good_end: bool | None
    """True if the run finished, False if it was stopped, None if no end is recorded."""

    @property
    def workers_lost(self) -> int:
        """Return the number of workers lost in all launches, without losses after which there was no new plan."""
        return len({(r.launch, worker) for r in self.recoveries if r.epoch is not None for worker in r.lost_workers})

    @property
    def losses(self) -> int:
        """Return the number of recoveries after a loss of workers; other recoveries only admit workers."""
        return sum(r.epoch is not None and bool(r.lost_workers) for r in self.recoveries)

    @property
    def seconds(self) -> float:
        """Return the time spent in all recoveries, in seconds."""
        return sum(recovery.total for recovery in self.recoveries)


def history(workers: Sequence[Event], coordinators: Sequence[Event], chaos: Sequence[Event]) -> History:
    """Return the history of a run from the events of workers, coordinators and fault injection, each in time order.

    Raises KeyError, TypeError or AttributeError for an invalid event.
    """
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
    listening: dict[str, set[float]] = {}  # file -> times; a candidate logs ``listening`` once per launch
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
    """Return the recoveries of the launch with number ``launch``, from the events of this launch."""
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
    for fault in by_plan.get(len(epochs), []):  # faults after the last plan
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
        # If no worker has reported the iteration, it is the iteration after the last commit.
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
    """Return phase -> longest time, in seconds, that an event reports.  ``only``: phases to return (empty: all)."""
    longest: dict[str, float] = {}
    for event in events:
        for name, seconds in event.get("seconds", {}).items():
            if not only or name in only:
                longest[name] = max(longest.get(name, 0.0), float(seconds))
    return longest


def _strike(fault: Event, chaos: Sequence[Event]) -> Event | None:
    """Return the last fault that was injected into the worker of ``fault`` before ``fault``; None if there is none."""
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
    """Drop repeated reports by several workers: events whose iteration and ``field`` equal an earlier event's."""
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
