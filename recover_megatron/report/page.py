"""Report of a run as one self-contained HTML page: results of the checks, then pictures, then tables.

This module computes the values for the template ``page.html``, which escapes them.
"""

from __future__ import annotations

import base64
import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import gmtime, strftime
from typing import Any

import jinja2

from recover_megatron.report import goodput, lanes
from recover_megatron.report.goodput import Account
from recover_megatron.report.history import PHASES, History, RecoveryRecord
from recover_megatron.report.lanes import Mark, stretches
from recover_megatron.report.run_dir import Comparison, Difference, RecordedRun
from recover_megatron.report.summary import failed, in_short, left_out, levels, repeated
from recover_megatron.run_log.events import Event
from recover_megatron.run_log.steps import StepRecord

MOST = 30
"""Largest number of checkpoints, or of losses of workers, in a table.  Losses with long recoveries are preferred."""


@dataclass(frozen=True)
class Table:
    """Table for the page: names of the columns, and rows of text."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: frozenset[str] = frozenset()
    """Names of the columns that are right-aligned, since they contain numbers."""


def around(recoveries: Sequence[RecoveryRecord], steps: Sequence[StepRecord]) -> Table | None:
    """Return a table of the microbatches that each replica counted when workers were lost; None if it has no rows.

    The table covers the iteration in which workers were lost, the iteration before and the iteration after, so that
    the reader sees which microbatches moved to other replicas.
    """
    known = {step.iteration: step for step in steps}
    losses = [r for r in recoveries if r.iteration is not None and r.lost_workers]
    losses = sorted(losses, key=lambda r: r.total, reverse=True)[:MOST]
    with_loss = {r.iteration for r in losses if r.iteration is not None}
    wanted = sorted({near for n in with_loss for near in (n - 1, n, n + 1)} & known.keys())
    rows = [
        [f"{n} (workers lost)" if n in with_loss else str(n), str(replica), ids_in_runs(ids)]
        for n in wanted
        for replica, ids in sorted(known[n].microbatches.items())
        if ids
    ]
    return Table(["iteration", "replica", "microbatches"], rows, frozenset({"replica"})) if rows else None


def ids_in_runs(ids: Sequence[int]) -> str:
    """Return ``ids`` as text in ascending order, three or more consecutive ids as a range: ``0, 4, 8-11``."""
    runs: list[list[int]] = []
    for j in sorted(ids):
        if runs and j == runs[-1][1] + 1:
            runs[-1][1] = j
        else:
            runs.append([j, j])
    parts = [f"{a}-{b}" if b > a + 1 else f"{a}, {b}" if b > a else str(a) for a, b in runs]
    return ", ".join(parts)


def checkpoints(events: Sequence[Event]) -> Table | None:
    """Return a table of the last complete checkpoints, in the order of time; None if there are none."""
    rows = [
        [str(event["saved"]), _date(event["time"]), str(event.get("folder", ""))]
        for event in events
        if event["event"] == "checkpoint" and "saved" in event
    ]
    return Table(["iteration", "complete", "folder"], rows[-MOST:], frozenset({"iteration"})) if rows else None


_REFRESH = 30
"""Seconds after which a browser reloads the page of a run that has not ended."""
_MAX_ROWS = 500
"""Largest number of rows of a table; if there are more recoveries, the longest are shown."""


@dataclass(frozen=True)
class Report:
    """Data of a run from which a page is created."""

    run: RecordedRun
    violations: Sequence[str]
    history: History
    reference: RecordedRun | None = None
    comparison: Comparison | None = None
    events: Sequence[Event] = ()
    """Events of the workers, in the order of time."""
    coordinators: Sequence[Event] = ()
    """Events of the coordinators, in the order of time."""
    spent: Sequence[Account] = ()
    """Uses of the wall-clock time up to each iteration (``goodput.accounts``), in the order of time."""


def page(report: Report, pictures: Mapping[str, Path]) -> str:
    """Return the HTML text of the page.  ``pictures``: title -> PNG file, in display order.  Raises OSError."""
    lost = [worker for worker in report.run.workers if worker.get("state") != "finished"]
    found = stretches(report.events, report.coordinators, max((s.time or 0.0 for s in report.run.steps), default=0.0))
    moments = marks(report.history, report.events)
    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    template = environment.from_string(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    return template.render(
        name=report.run.folder.resolve().name,
        most_rows=_MAX_ROWS,
        verdicts=_verdicts(report),
        tiles=_tiles(report),
        problems=[*report.violations, *(report.comparison.unlike if report.comparison else ())],
        lanes=lanes.svg(found, moments),
        lanes_legend=lanes.legend(found, moments),
        goodput=goodput.svg(report.spent),
        goodput_legend=goodput.legend(report.spent),
        refresh=_REFRESH if report.history.good_end is None else 0,
        alternative_texts=alternative_texts(report),
        pictures={title: base64.b64encode(path.read_bytes()).decode() for title, path in pictures.items()},
        recoveries=_recoveries(report.history),
        recovered=len(report.history.recoveries),
        around=around(report.history.recoveries, report.run.steps),
        checkpoints=checkpoints(report.events),
        throughput=_throughput(report),
        changes=_changes(report.history),
        workers=report.run.workers,
        finished=len(report.run.workers) - len(lost),
        lost=_lost(lost),
        setup=_setup(report),
    )


def marks(past: History, events: Sequence[Event] = ()) -> list[Mark]:
    """Return marks for the lanes: recoveries, rollbacks, snapshots in memory.  ``events``: events of the workers."""
    recoveries = [
        Mark(r.time, f"iteration {_maybe(r.iteration)}: {'; '.join(r.causes) or 'a new epoch'}; {_ms(r.total)}")
        for r in past.recoveries
        if r.epoch is not None
    ]
    back = [
        Mark(
            event["time"], f"rolled back {_note(event)[1]}", "from-memory" if event["tier"] == "memory" else "from-disk"
        )
        for event in past.others
        if event["event"] == "rolled back"
    ]
    snapshots = [
        Mark(event["time"], f"snapshot of iteration {event.get('after')} is complete", "snapshot")
        for event in events
        if event["event"] == "snapshot"
    ]
    return [*recoveries, *back, *snapshots]


def alternative_texts(report: Report) -> defaultdict[str, str]:
    """Return title of a picture -> alternative text; "" for a title without text."""
    words: defaultdict[str, str] = defaultdict(str)
    if steps := report.run.steps:
        losses = [step.loss for step in steps if step.loss is not None]
        span = f"iterations {steps[0].iteration} to {steps[-1].iteration}"
        if losses:
            words["Loss"] = f"from {losses[0]:.4g} to {losses[-1]:.4g} over {span}"
        words["Replicas and their microbatches"] = f"{_alive(report)} replicas over {span}"
        rates = [f"{level.samples_per_second:,.1f} with {_replicas(level.replicas)}" for level in levels(steps)]
        words["Throughput"] = f"samples per second, medians: {'; '.join(rates)}"
    times = [r.total for r in report.history.recoveries if r.total > 0]
    if times:
        words["Time of each recovery"] = f"{len(times)}, median {_ms(median(times))}, longest {_ms(max(times))}"
    return words


# -- at a glance ------------------------------------------------------------------------------------------------------


def _verdicts(report: Report) -> list[tuple[str, str, str]]:
    """Return statements about the audit, the run's end and damaged files, each as (CSS class, heading, sentence)."""
    steps = report.run.steps
    if (missing := report.violations) and not failed(missing):
        bars = [("open", "AUDIT INCOMPLETE", in_short(missing))]
    elif report.violations:
        bars = [("fail", "AUDIT FAILED", in_short(failed(report.violations)))]
    elif not steps:
        bars = [("open", "NOTHING TO AUDIT", "no iteration was committed")]
    else:
        of = f"in each of {len(steps):,} iterations ({steps[0].iteration} to {steps[-1].iteration})"
        text = f"{of} each of the {report.run.microbatches} microbatches was counted exactly once"
        bars = [("pass", "AUDIT PASSED", text)]
    if report.history.good_end is False:
        bars.append(("fail", "ENDED EARLY", report.history.end))
    if report.run.spoiled:
        bars.append(("open", "LEFT OUT", left_out(report.run.spoiled)))
    return bars


def _tiles(report: Report) -> list[tuple[str, str]]:
    steps, past = report.run.steps, report.history
    tiles = []
    if report.comparison is not None:
        tiles.append(_difference_tile("loss", report.comparison.worst_loss, report.comparison.iterations))
        tiles.append(_difference_tile("grad norm", report.comparison.worst_grad_norm, report.comparison.iterations))
    lost = f"{past.workers_lost} worker{'' if past.workers_lost == 1 else 's'} lost"
    tiles.append((lost, f"in {past.losses} recover{'y' if past.losses == 1 else 'ies'}"))
    if steps:
        share = past.seconds / max(sum(step.seconds for step in steps), 1e-9)
        times = [r.total for r in past.recoveries if r.total > 0]
        middle = f"median {_ms(median(times))} each, {share:.2%} of the iterations' time" if times else "no recovery"
        tiles.append((f"{past.seconds:.2f} s recovering", middle))
        tiles.append((_alive(report), "replicas at the start and at the end"))
        for level in levels(steps)[:1]:
            with_them = f"median with {_replicas(level.replicas)}"
            tiles.append((f"{level.samples_per_second:,.1f} samples/s", with_them))
            if tokens := (past.start or {}).get("tokens_per_sample"):
                rate = level.samples_per_second * tokens
                tiles.append((f"{rate:,.0f} tokens/s", with_them))
    tiles.append(("ended" if past.good_end else "stopped" if past.good_end is False else "no end", past.end))
    if report.spent:
        worked, rest = goodput.in_short(report.spent[-1])
        tiles.append((f"{worked} goodput", rest))
    return tiles


def _difference_tile(what: str, worst: Difference | None, iterations: int) -> tuple[str, str]:
    if worst is None:
        return "not comparable", f"the reference has no {what} for the same iterations"
    if worst.relative == 0:
        return "equal", f"{what} equal in all digits; {iterations:,} iterations compared with the reference"
    return (
        f"{worst.relative:.2e}",
        f"largest relative difference of the {what}, in iteration {worst.iteration} "
        f"({worst.run!r}, reference {worst.reference!r}); {iterations:,} iterations compared",
    )


def _alive(report: Report) -> str:
    first, last = report.run.steps[0].replicas, report.run.steps[-1].replicas
    return f"{first} → {last}"


def _replicas(number: int) -> str:
    return f"{number} replica{'' if number == 1 else 's'}"


# -- details ----------------------------------------------------------------------------------------------------------


def _recoveries(past: History) -> Table | None:
    if not past.recoveries:
        return None
    shown = sorted(past.recoveries, key=lambda r: r.total, reverse=True)[:_MAX_ROWS]
    shown.sort(key=lambda r: r.time)
    others = sorted({name for r in shown for name in r.seconds} - set(PHASES))
    phases = [name for name in (*PHASES, *others) if any(name in r.seconds for r in shown)]
    head = ["iteration", "epoch", "lost, formed", "cause", "survivors in", "replicas after", "run again"]
    head += [*phases, "total"]
    if past.launches > 1:
        head.insert(0, "launch")
    numbers = frozenset({"iteration", "epoch", "replicas after", "run again", "launch", "total", *phases})
    return Table(head, [_recovery_row(r, phases, past.launches > 1) for r in shown], numbers)


def _recovery_row(r: RecoveryRecord, phases: Sequence[str], launches: bool) -> list[str]:
    lost = [f"workers {_ids(r.lost_workers)}"] if r.lost_workers else []
    lost += [f"replicas {_ids(r.lost_replicas)}"] if r.lost_replicas else []
    lost += [f"formed: replicas {_ids(r.fresh)}"] if r.fresh else []
    row = [str(r.launch + 1)] if launches else []
    row += [_maybe(r.iteration), "none followed" if r.epoch is None else str(r.epoch)]
    row += ["; ".join(lost), "; ".join(r.causes), r.phase, _maybe(r.replicas), str(r.reran) if r.reran else ""]
    return row + [f"{1000 * r.seconds[p]:,.1f}" if p in r.seconds else "" for p in phases] + [f"{1000 * r.total:,.1f}"]


def _throughput(report: Report) -> Table | None:
    found = levels(report.run.steps)
    if not found:
        return None
    full = found[0]
    rows = [
        [
            str(level.replicas),
            f"{level.iterations:,}",
            f"{level.seconds:.4f}",
            f"{level.samples_per_second:,.1f}",
            f"{level.samples_per_second / full.samples_per_second:.0%}",
            f"{level.replicas / full.replicas:.0%}",
        ]
        for level in found
    ]
    head = ["replicas", "iterations", "seconds, median", "samples/s, median", "of full rate", "of full replicas"]
    return Table(head, rows, frozenset(head))


def _changes(past: History) -> Table | None:
    rows = []
    for event in past.quotas:
        rows.append([str(event["iteration"]), "quotas balanced", _pairs(event.get("quotas", {}))])
    rows += [[str(event["iteration"]), *_note(event)] for event in past.others]
    rows.sort(key=lambda row: int(row[0]))
    return Table(["iteration", "change", ""], rows[:_MAX_ROWS], frozenset({"iteration"})) if rows else None


def _note(event: Mapping[str, Any]) -> tuple[str, str]:
    if event["event"] == "again":
        return event["what"], "repeated by the remaining workers"
    if event["event"] == "rolled back":
        return "rolled back", f"to iteration {event['to']} from {event['tier']}, {repeated(event)}"
    return "checkpoint abandoned", "a worker that was writing it in the background was lost"


def _lost(workers: Sequence[Mapping[str, object]]) -> Table | None:
    head = ["worker_id", "host", "state", "signal", "exit_code"]
    rows = [[_maybe(worker.get(name)) for name in head] for worker in workers[:_MAX_ROWS]]
    return Table(head, rows, frozenset({"worker_id", "signal", "exit_code"})) if rows else None


def _setup(report: Report) -> Table:
    rows = [["folder", str(report.run.folder)]]
    if report.reference is not None:
        rows.append(["reference", str(report.reference.folder)])
    if start := report.history.start:
        rows.append(["workers", _maybe(start.get("world"))])
        rows.append(["replicas at the start", str(len(start.get("replicas", ())))])
        rows.append(["shape", _pairs(start.get("shape", {}))])
        rows.append(["microbatches per iteration", _maybe(start.get("microbatches"))])
        if isinstance(argv := start.get("argv"), list):
            rows.append(["command line", shlex.join(map(str, argv))])
        if isinstance(versions := start.get("versions"), dict):
            rows.append(["versions", ", ".join(f"{name} {version}" for name, version in versions.items())])
        rows.append(["started", _date(start["time"])])
    if report.history.launches > 1:
        rows.append(["launches into this folder", str(report.history.launches)])
    return Table(["", ""], rows)


def _ids(ids: Sequence[int]) -> str:
    return ", ".join(map(str, ids[:12])) + (f", ... ({len(ids)})" if len(ids) > 12 else "")


def _pairs(items: Mapping[str, object]) -> str:
    return ", ".join(f"{name}: {value}" for name, value in items.items())


def _maybe(value: object) -> str:
    return "" if value is None else str(value)


def _date(time: float) -> str:
    return strftime("%Y-%m-%d %H:%M:%S UTC", gmtime(time))


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.0f} ms"
