"""Parts of the report in which something is looked up: microbatches around a loss, checkpoints, versions."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import gmtime, strftime

from recover_megatron.report.history import RecoveryRecord
from recover_megatron.run_log.events import Event
from recover_megatron.run_log.steps import StepRecord

MOST = 30
"""Losses of which the iterations around are shown: the longest recoveries."""


@dataclass(frozen=True)
class Table:
    """Rows of text under the names of their columns."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: frozenset[str] = frozenset()
    """Columns that are set as numbers."""


def around(recoveries: Sequence[RecoveryRecord], steps: Sequence[StepRecord]) -> Table | None:
    """The microbatches that each replica counted in the iteration of each loss, the one before and the one after.

    Those that a replica ran beyond what it would have had are not marked: the row above has them.
    """
    known = {step.iteration: step for step in steps}
    losses = [r for r in recoveries if r.iteration is not None and r.lost_workers]
    losses = sorted(losses, key=lambda r: r.total, reverse=True)[:MOST]
    struck = {r.iteration for r in losses if r.iteration is not None}
    wanted = sorted({near for n in struck for near in (n - 1, n, n + 1)} & known.keys())
    rows = [
        [f"{n} (a loss)" if n in struck else str(n), str(replica), ids_in_runs(ids)]
        for n in wanted
        for replica, ids in sorted(known[n].microbatches.items())
        if ids
    ]
    return Table(["iteration", "replica", "microbatches"], rows, frozenset({"replica"})) if rows else None


def ids_in_runs(ids: Sequence[int]) -> str:
    """``0, 4, 8-11``: ascending, runs of three or more in short."""
    runs: list[list[int]] = []
    for j in sorted(ids):
        if runs and j == runs[-1][1] + 1:
            runs[-1][1] = j
        else:
            runs.append([j, j])
    parts = [f"{a}-{b}" if b > a + 1 else f"{a}, {b}" if b > a else str(a) for a, b in runs]
    return ", ".join(parts)


def checkpoints(events: Sequence[Event]) -> Table | None:
    """Those that were complete, in the order of time."""
    saved = [event for event in events if event["event"] == "checkpoint" and "saved" in event]
    rows = [
        [str(event["saved"]), strftime("%Y-%m-%d %H:%M:%S UTC", gmtime(event["time"])), str(event.get("folder", ""))]
        for event in saved
    ]
    return Table(["iteration", "complete", "folder"], rows[-MOST:], frozenset({"iteration"})) if rows else None


def started_with(start: Mapping[str, object]) -> list[list[str]]:
    """Rows for what the training was started with, as far as it was told."""
    rows = []
    if isinstance(argv := start.get("argv"), list):
        rows.append(["command line", shlex.join(map(str, argv))])
    if isinstance(versions := start.get("versions"), dict):
        rows.append(["versions", ", ".join(f"{name} {version}" for name, version in versions.items())])
    return rows
