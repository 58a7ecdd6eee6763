"""The report of a run as one HTML page, with nothing outside of it: the verdict first, then pictures, then tables.

Everything that comes from files is escaped: reasons and host names have travelled over the network.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median
from time import gmtime, strftime

from recover_megatron.report.compare import Comparison, Difference
from recover_megatron.report.history import PHASES, History, Recovery
from recover_megatron.report.run_dir import Run
from recover_megatron.report.throughput import levels
from recover_megatron.run_log.audit import microbatches_per_iteration

_MAX_ROWS = 500
"""Of a table; a run with more faults shows the longest recoveries."""

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 70rem; margin: 2rem auto;
       padding: 0 1rem }
h1 { font-size: 1.5rem; margin-bottom: .5rem } h2 { font-size: 1.15rem; margin-top: 2.5rem }
.verdict { padding: .8rem 1.2rem; border-radius: .5rem; color: #fff; font-size: 1.1rem }
.verdict { margin-bottom: .5rem } .verdict b { margin-right: .6rem }
.pass { background: #1b7f3b } .fail { background: #b3261e } .open { background: #8a6d00 }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(13rem, 1fr)); gap: .8rem; margin: 1rem 0 }
.tile { border: 1px solid #ddd; border-radius: .5rem; padding: .6rem .9rem }
.tile b { display: block; font-size: 1.4rem } .tile span { color: #666; font-size: .85rem }
table { border-collapse: collapse; width: 100%; font-size: .9rem; display: block; overflow-x: auto }
th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid #e5e5e5; vertical-align: top }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
img { max-width: 100% } ul.bad { color: #b3261e }
"""


@dataclass(frozen=True)
class Report:
    """All that a page tells."""

    run: Run
    violations: Sequence[str]
    history: History
    reference: Run | None = None
    comparison: Comparison | None = None


def page(report: Report, pictures: Mapping[str, Path]) -> str:
    """The HTML text.  ``pictures``: title -> PNG, in the order to show them.  Raises OSError."""
    name = escape(report.run.folder.resolve().name)
    parts = [f"<h1>Run {name}</h1>", _verdict(report), _tiles(report), _problems(report)]
    parts += [_picture(title, path) for title, path in pictures.items()]
    if not pictures:
        parts.append("<p>No pictures: matplotlib is not installed.</p>")
    parts += [
        _recoveries(report.history),
        _levels(report),
        _changes(report.history),
        _workers(report.run),
        _setup(report),
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>\n<body>\n'
        + "\n".join(part for part in parts if part)
        + "\n</body></html>\n"
    )


# -- at a glance ------------------------------------------------------------------------------------------------------


def verdict(report: Report) -> tuple[str, str, str]:
    """How the run is judged: CSS class, the word, the sentence."""
    steps = report.run.steps
    if report.violations:
        more = f" (and {len(report.violations) - 1} more)" if len(report.violations) > 1 else ""
        return "fail", "AUDIT FAILED", report.violations[0] + more
    if not steps:
        return "open", "NOTHING TO AUDIT", "no iteration was committed"
    total = report.run.settings.get("microbatches") or microbatches_per_iteration(steps)
    return (
        "pass",
        "AUDIT PASSED",
        f"in each of {len(steps):,} iterations ({steps[0].iteration} to {steps[-1].iteration}) "
        f"each of the {total} microbatches was counted exactly once",
    )


def _verdict(report: Report) -> str:
    css, word, sentence = verdict(report)
    bars = [f'<div class="verdict {css}"><b>{word}</b>{escape(sentence)}</div>']
    if report.history.good_end is False:
        bars.append(f'<div class="verdict fail"><b>ENDED EARLY</b>{escape(report.history.end)}</div>')
    return "\n".join(bars)


def _tiles(report: Report) -> str:
    steps, past = report.run.steps, report.history
    tiles = []
    if report.comparison is not None:
        tiles.append(_difference_tile("loss", report.comparison.worst_loss, report.comparison.iterations))
        tiles.append(_difference_tile("grad norm", report.comparison.worst_grad_norm, report.comparison.iterations))
    lost = past.workers_lost
    tiles.append(
        (
            f"{lost} worker{'' if lost == 1 else 's'} lost",
            f"in {len(past.recoveries)} recover{'y' if len(past.recoveries) == 1 else 'ies'}",
        )
    )
    if steps:
        share = past.seconds / max(sum(step.seconds for step in steps), 1e-9)
        times = [r.total for r in past.recoveries if r.total > 0]
        middle = f"median {_ms(median(times))} each, {share:.2%} of the iterations' time" if times else "no recovery"
        tiles.append((f"{past.seconds:.2f} s recovering", middle))
        tiles.append((_alive(report), "replicas at the start and at the end"))
        for level in levels(steps)[:1]:
            tiles.append((f"{level.samples_per_second:,.1f} samples/s", f"median with {level.replicas} replicas"))
    tiles.append(("ended" if past.good_end else "stopped" if past.good_end is False else "no end", past.end))
    cells = (f'<div class="tile"><b>{escape(big)}</b><span>{escape(small)}</span></div>' for big, small in tiles)
    return f'<div class="tiles">{"".join(cells)}</div>'


def _difference_tile(what: str, worst: Difference | None, iterations: int) -> tuple[str, str]:
    if worst is None:
        return "not comparable", f"the reference has no {what} of the same iterations"
    if worst.relative == 0:
        return "equal", f"{what}: all digits, {iterations:,} iterations compared with the reference"
    return (
        f"{worst.relative:.2e}",
        f"largest relative difference of the {what}, in iteration {worst.iteration} "
        f"({worst.run!r}, reference {worst.reference!r}); {iterations:,} compared",
    )


def _alive(report: Report) -> str:
    first, last = report.run.steps[0].replicas, report.run.steps[-1].replicas
    return f"{first} → {last}"


def _problems(report: Report) -> str:
    found = [*report.violations, *(report.comparison.unlike if report.comparison else ())]
    if not found:
        return ""
    rows = "".join(f"<li>{escape(problem)}</li>" for problem in found[:_MAX_ROWS])
    return f'<h2>What is wrong ({len(found)})</h2><ul class="bad">{rows}</ul>'


# -- details ----------------------------------------------------------------------------------------------------------


def _picture(title: str, path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<h2>{escape(title)}</h2><img alt="{escape(title)}" src="data:image/png;base64,{data}">'


def _recoveries(past: History) -> str:
    if not past.recoveries:
        return "<h2>Recoveries</h2><p>No fault is recorded.</p>"
    shown = sorted(past.recoveries, key=lambda r: r.total, reverse=True)[:_MAX_ROWS]
    shown.sort(key=lambda r: r.time)
    others = sorted({name for r in shown for name in r.seconds} - set(PHASES))
    phases = [name for name in (*PHASES, *others) if any(name in r.seconds for r in shown)]
    head = [
        "iteration",
        "epoch",
        "lost, put together",
        "cause",
        "they were in",
        "replicas after",
        "run again",
        *phases,
        "total",
    ]
    if past.launches > 1:
        head.insert(0, "launch")
    numbers = {"iteration", "epoch", "replicas after", "run again", "launch", "total", *phases}
    rows = [_recovery_row(r, phases, past.launches > 1) for r in shown]
    note = f" (the longest {_MAX_ROWS} of {len(past.recoveries)})" if len(shown) < len(past.recoveries) else ""
    return (
        f"<h2>Recoveries{note}</h2><p>Times in milliseconds; of several workers' accounts the longest. "
        "<i>detect</i> is the time from a strike of chaos to the coordinator, and not part of the total.</p>"
        + _table(head, rows, numbers)
    )


def _recovery_row(r: Recovery, phases: Sequence[str], launches: bool) -> list[str]:
    lost = [f"workers {_ids(r.lost_workers)}"] if r.lost_workers else []
    lost += [f"replicas {_ids(r.lost_replicas)}"] if r.lost_replicas else []
    lost += [f"put together: replicas {_ids(r.fresh)}"] if r.fresh else []
    row = [str(r.launch + 1)] if launches else []
    row += [_maybe(r.iteration), "none followed" if r.epoch is None else str(r.epoch)]
    row += ["; ".join(lost), "; ".join(r.causes), r.phase, _maybe(r.replicas), str(r.reran) if r.reran else ""]
    return row + [f"{1000 * r.seconds[p]:,.1f}" if p in r.seconds else "" for p in phases] + [f"{1000 * r.total:,.1f}"]


def _levels(report: Report) -> str:
    found = levels(report.run.steps)
    if not found:
        return ""
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
    head = ["replicas", "iterations", "seconds, median", "samples/s, median", "of the most", "replicas of the most"]
    return "<h2>Throughput by replicas</h2>" + _table(head, rows, set(head))


def _changes(past: History) -> str:
    rows = []
    for event in past.quotas:
        rows.append([str(event["iteration"]), "quotas balanced", _pairs(event.get("quotas", {}))])
    for event in past.others:
        what = {"writer": f"worker {event.get('worker')} writes and prints now"}.get(
            event["event"], f"retried {event.get('retries')} times"
        )
        rows.append([str(event["iteration"]), event["event"], what])
    if not rows:
        return ""
    rows.sort(key=lambda row: int(row[0]))
    return "<h2>Other changes</h2>" + _table(["iteration", "what", ""], rows[:_MAX_ROWS], {"iteration"})


def _workers(run: Run) -> str:
    lost = [worker for worker in run.workers if worker.get("state") != "finished"]
    if not run.workers:
        return ""
    text = f"<h2>Workers</h2><p>{len(run.workers)} workers, {len(run.workers) - len(lost)} finished.</p>"
    head = ["worker_id", "host", "state", "signal", "exit_code"]
    rows = [[_maybe(worker.get(name)) for name in head] for worker in lost[:_MAX_ROWS]]
    return text + (_table(head, rows, {"worker_id", "signal", "exit_code"}) if rows else "")


def _setup(report: Report) -> str:
    rows = [["folder", str(report.run.folder)]]
    if report.reference is not None:
        rows.append(["reference", str(report.reference.folder)])
    if start := report.history.start:
        rows.append(["workers", _maybe(start.get("world"))])
        rows.append(["replicas at the start", str(len(start.get("replicas", ())))])
        rows.append(["shape", _pairs(start.get("shape", {}))])
        rows.append(["microbatches of an iteration", _maybe(start.get("microbatches"))])
        rows.append(["started", strftime("%Y-%m-%d %H:%M:%S UTC", gmtime(start["time"]))])
    if report.history.launches > 1:
        rows.append(["launches into this folder", str(report.history.launches)])
    return "<h2>The run</h2>" + _table(["", ""], rows, set())


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: set[str]) -> str:
    css = [' class="n"' if name in numbers else "" for name in head]
    top = "".join(f"<th{c}>{escape(name)}</th>" for c, name in zip(css, head, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{c}>{escape(cell)}</td>" for c, cell in zip(css, row, strict=True)) + "</tr>"
        for row in rows
    )
    return f"<table><tr>{top}</tr>{body}</table>"


def _ids(ids: Sequence[int]) -> str:
    return ", ".join(map(str, ids[:12])) + (f", ... ({len(ids)})" if len(ids) > 12 else "")


def _pairs(items: Mapping[str, object]) -> str:
    return ", ".join(f"{name}: {value}" for name, value in items.items())


def _maybe(value: object) -> str:
    return "" if value is None else str(value)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.0f} ms"
