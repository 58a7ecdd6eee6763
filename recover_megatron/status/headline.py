"""State of a run in one word, for users, monitoring (``recover-status --check``) and metrics; pure.

STARTING     the first epoch is being formed                           warning
HEALTHY      at least as many replicas as at launch                    ok
DEGRADED     fewer replicas than at launch                             warning
RECOVERING   a later epoch is being formed, or no coordinator leads    warning
STALLED      the run waits for workers that make no progress           critical
ENDED        the run has ended with exit code 0                        ok
ENDED        the run has ended with another exit code                  critical

HEALTHY and DEGRADED compare numbers of workers if the plans name no replicas.  Otherwise, their text also names workers
that are set aside, and nodes that are being drained, which are no losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from recover_megatron.membership.records import ranges
from recover_megatron.status.model import RunStatus, WorkerStatus, of_launch

HELD_UP_SECONDS = 20.0
"""Seconds without progress after which a worker counts as stalled, if other workers wait for it."""
HELD_UP_ITERATIONS = 5
"""If this number of iterations takes longer than ``HELD_UP_SECONDS``, their time is the limit instead."""
QUIET_SECONDS = 3.0
"""Seconds without a message after which a worker counts as silent; usually a worker sends a heartbeat every second."""
DESCRIBED = 3
"""Largest number of awaited workers that are described with host and phase; if there are more, only ids are listed."""
WRITES = ("checkpoint", "rollback")
"""Phases that may take long, so that a worker in such a phase does not count as stalled."""


class Level(IntEnum):
    """Exit codes of ``--check``, as defined by Nagios."""

    OK = 0
    WARNING = 1
    CRITICAL = 2
    UNKNOWN = 3


@dataclass(frozen=True)
class Headline:
    """State of a run: ``word`` is a word from the module's table, and ``text`` a sentence that begins with it."""

    word: str
    text: str
    level: Level


def headline(status: RunStatus) -> Headline:
    if status.code is not None:
        verdict = "finished, " if status.code == 0 else ""
        text = f"ENDED: {verdict}exit code {status.code}: {status.reason}"
        return Headline("ENDED", text, Level.CRITICAL if status.code else Level.OK)
    if (stall := status.stall) is not None:
        what = f"waits for workers {some(stall.workers)}" if len(stall.workers) > 1 else "waits for one worker"
        where = f", {stall.where[0]}" if len(stall.workers) == 1 and stall.where else ""
        return _stalled(f"for {span(stall.seconds)}: {what}{where}")
    if status.state in ("standby", "gathering", "rendezvous"):
        return _between(status)
    if (culprit := held_up_by(status)) is not None:
        since = max(culprit.marked or 0.0, 0.0)
        return _stalled(f"{span(since)} in {culprit.phase or 'no phase'} at worker {culprit.worker} on {culprit.host}")
    running, of = len(status.grid), status.replicas_of_launch
    if of is None:
        return _by_workers(status)
    if running < of:
        return Headline("DEGRADED", f"DEGRADED {running}/{of} replicas{_passing(status)}", Level.WARNING)
    replicas = f"{running}/{of} replicas" if running == of else of_launch(running, of, "replicas")
    return Headline("HEALTHY", f"HEALTHY {replicas}{_passing(status)}", Level.OK)


def _by_workers(status: RunStatus) -> Headline:
    """Return the headline of a run whose plans name no replicas (the library's API), from numbers of workers.

    A worker that left in order is not missing.
    """
    left = sum(gone.fate == "left" for gone in status.gone)
    if status.live + left < (of := status.workers_of_launch or 0):
        return Headline("DEGRADED", f"DEGRADED {status.live}/{of} workers", Level.WARNING)
    return Headline("HEALTHY", "HEALTHY", Level.OK)


def _passing(status: RunStatus) -> str:
    """Return a text that names the workers that are set aside and the nodes that are being drained."""
    aside = [f"worker{'s' * (len(status.aside) > 1)} {some(status.aside)} set aside"] if status.aside else []
    nodes = status.draining
    drains = [f"node{'s' * (len(nodes) > 1)} {some(nodes)} being drained"] if nodes else []
    return "".join(f", {text}" for text in (*aside, *drains))


def held_up_by(status: RunStatus) -> WorkerStatus | None:
    """Return the worker without progress for the longest time, if other workers have waited for it too long.

    None if there is no such worker.
    """
    placed = status.placed
    usual = status.training.seconds_per_iteration if status.training is not None else None
    limit = max(HELD_UP_SECONDS, HELD_UP_ITERATIONS * (usual or 0.0))
    if not any((worker.waiting or 0.0) > limit for worker in placed):
        return None
    late = [w for w in placed if w.waiting is None and (w.marked or 0.0) > limit and w.phase not in WRITES]
    return max(late, key=lambda worker: worker.marked or 0.0, default=None)


def span(seconds: float | None) -> str:
    """Return ``seconds`` as a short text such as "12 s" or "3 min"; empty for None."""
    if seconds is None:
        return ""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def some(things: Sequence[object], most: int = 8) -> str:
    shown = ", ".join(map(str, things[:most]))
    return f"{shown} and {len(things) - most} more" if len(things) > most else shown


def _stalled(text: str) -> Headline:
    return Headline("STALLED", f"STALLED {text}", Level.CRITICAL)


def _between(status: RunStatus) -> Headline:
    """Return the headline of a run that starts or recovers: how long this has taken, and which workers it waits for."""
    word = "RECOVERING" if status.epoch else "STARTING"
    absent = [worker for worker in status.workers if worker.silence is None]
    come = f"{status.attached or 'none'} of {status.live} workers are connected"
    come += f", but not {_named(absent)}" if absent and status.attached else ""
    awaited = [worker for worker in status.workers if worker.worker in status.awaited]
    if status.state == "standby" and (status.epoch or not absent):
        text = f"no coordinator leads: {come}"
    elif status.state == "gathering":
        text = f"a new coordinator waits for all workers to connect: {come}"
    elif not status.epoch and absent:
        text = come
    elif not status.epoch and len(awaited) == status.live:
        silent = [worker for worker in awaited if (worker.silence or 0.0) > QUIET_SECONDS]
        text = "the workers build their models" + (f"; no messages from {_named(silent)}" if silent else "")
    elif awaited:
        ready = sum(worker.joined for worker in status.workers)
        what = f"for epoch {status.opened}" if status.epoch else "to train"
        text = f"{ready} of {ready + len(awaited)} workers are ready {what}; not ready: {_named(awaited)}"
    else:
        text = f"opens epoch {status.opened}" if status.epoch else "all workers are ready"
    since = f" for {span(status.between)}" if status.between is not None else ""
    return Headline(word, f"{word}{since}: {text}", Level.WARNING)


def _named(workers: Sequence[WorkerStatus]) -> str:
    """Return ``workers`` as text, with host and phase of each; for more than ``DESCRIBED`` workers, only the ids."""
    if len(workers) > DESCRIBED:
        return f"workers {ranges([worker.worker for worker in workers])}"
    return ", ".join(map(_described, workers))


def _described(worker: WorkerStatus) -> str:
    where = f" on {worker.host}" if worker.host else ""
    details = [f"in {worker.phase}"] if worker.phase else []
    if worker.silence is None:
        details = [f"pid {worker.pid}"] if worker.pid is not None else []
    elif worker.silence > QUIET_SECONDS:
        details = [f"silent for {span(worker.silence)}", *details]
    elif worker.marked is not None:
        details += [f"no progress for {span(worker.marked)}"]
    return f"worker {worker.worker}{where}" + (f" ({', '.join(details)})" if details else "")
