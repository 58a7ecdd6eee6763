"""Display of a ``RunStatus`` on a terminal: ``render`` creates a rich renderable, ``follow`` shows the live view.

``render`` is pure.  It shows data from members as ``Text``, never as markup.  In each interval, the live view asks
for a status:

status       show it
no answer    show the last status with the error; after ``patience`` seconds, raise ``NoAnswer``
run's end    show the last status with the end of the run, and return
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from recover_megatron.membership.io.observer import NoAnswer
from recover_megatron.membership.records import AuthenticationError, ranges
from recover_megatron.status.headline import QUIET_SECONDS, WRITES, Level, headline, some, span
from recover_megatron.status.model import (
    DrainStatus,
    Fault,
    Gone,
    RecoveryStatus,
    Replica,
    RunStatus,
    Training,
    WorkerStatus,
    of_launch,
)
from recover_megatron.status.source import Source

COLOURS = {Level.OK: "green", Level.WARNING: "yellow", Level.CRITICAL: "red", Level.UNKNOWN: "red"}
ACTIVITY = ("worker", "node", "GPU", "pid", "iteration", "phase", "microbatch", "silent")
"""Names of the columns that describe a worker."""
NUMBERS = frozenset("replica quota position worker iteration microbatch workers epoch GPU pid".split())
"""Names of the columns with numbers."""
_TERM_COUNTER = 32  # number of low bits of a term that are not shown, since they only make the term unique


def render(status: RunStatus, lines: int | None = None, complaint: str = "") -> RenderableType:
    """Return the complete view.

    ``lines``: largest height in lines; None: no limit.  ``complaint``: reason why ``status`` is not new, or "".
    """
    parts: list[RenderableType] = [_headline(status, complaint)]
    if status.stall is not None:
        parts += [Text(f"  {where}", "yellow") for where in status.stall.where]
        left = "the run waits for them without limit, since no other worker waits for them"
        if status.stall.left is not None:
            writes = any(worker.phase in WRITES for worker in status.workers if worker.worker in status.stall.workers)
            why = "limit for a checkpoint: an hour" if writes else "--recover-stall-timeout"
            left = f"they are evicted if they do not come back within {span(status.stall.left)} ({why})"
        parts.append(Text(f"  {left}", "dim"))
    few = None if lines is None else 8
    room = None if lines is None else max(4, lines - 9 - _lines_of(status))
    tables = {
        "grid": _grid(status.grid, room),
        f"workers{' whose replica is not known' * (status.replicas_of_launch is not None)}": _loose(
            status.unplaced, room
        ),
        "spares": _loose(status.spares, few),
        "drained nodes": _drains(status.drains),
        "gone": _gone(status.gone, few),
        "last faults": _faults(_newest(status.faults, lines)),
        "last plans": _recoveries(_newest(status.recoveries, lines)),
    }
    for title, table in tables.items():
        if table.rows:
            parts += [Text(), Text(title, "bold"), table]
    if status.hidden:
        parts.append(Text(f"{status.hidden} more workers are not shown", style="dim"))
    return Group(*parts)


def _drains(drains: Sequence[DrainStatus]) -> Table:
    table = _table("node", "is", "workers there", "why")
    for row in drains:
        text = {"drained": "drained: it may be switched off", "moving": "being drained"}.get(row.state, row.state)
        _add(table, row.node, text, ranges(row.workers), row.reason)
    return table


def _headline(status: RunStatus, complaint: str) -> Panel:
    head = headline(status)
    first = Text.assemble((head.text, f"bold {COLOURS[head.level]}"), f"   epoch {status.epoch}")
    first.append(f"   term {status.term >> _TERM_COUNTER}")
    rows = [first]
    if status.training is not None:
        rows += [_pace(status.training, status.code is not None), _care(status, status.training)]
    if status.code is not None:
        return _panel(status, *rows, *_at_the_end(status))
    second = Text.assemble(("iteration ", "dim"), (str(status.iteration), "bold"))
    second.append_text(Text.assemble(("   replicas ", "dim"), _replicas(status)))
    second.append_text(Text.assemble(("   workers ", "dim"), f"{status.live} of {status.world}"))
    second.append_text(Text.assemble(("   spares ", "dim"), str(len(status.spares))))
    if status.restarts is not None:
        second.append_text(Text.assemble(("   restarts ", "dim"), str(status.restarts)))
    if status.loss is not None and status.training is None:
        second.append_text(Text.assemble(("   loss ", "dim"), f"{status.loss:.4f}"))
    second.append(f"   last step {span(status.commit_age)} ago" if status.commit_age is not None else "")
    return _panel(status, first, second, *rows[1:], *([Text(complaint, "bold red")] if complaint else []))


def _pace(training: Training, ended: bool) -> Text:
    """Return the row with the training's iteration, loss and speed."""
    of = f" of {training.train_iters}" if training.train_iters else ""
    parts = [("step ", f"{training.iteration}{of}")]
    if training.loss is not None:
        parts.append(("loss ", f"{training.loss:.4f}"))
    if training.seconds_per_iteration is not None:
        parts.append(("", f"{1000 * training.seconds_per_iteration:.1f} ms per iteration"))
    if training.samples_per_second is not None:
        parts.append(("", f"{training.samples_per_second:.1f} samples/s"))
    if training.tflops_per_gpu is not None:
        parts.append(("", f"{training.tflops_per_gpu:.3g} TFLOP/s per GPU"))
    if training.eta_seconds and not ended:
        parts.append(("", f"{span(training.eta_seconds)} to go"))
    return _spaced(parts)


def _care(status: RunStatus, training: Training) -> Text:
    """Return the row with goodput, recoveries and the last checkpoint."""
    parts = [] if training.goodput is None else [("goodput ", f"{100 * training.goodput:.0f} %")]
    parts.append(("recoveries ", f"{training.recoveries} ({training.microbatches_rerun} microbatches run again)"))
    if training.checkpoint is not None:
        parts.append(("checkpoint ", f"iteration {training.checkpoint}, {span(training.checkpoint_age)} ago"))
    else:
        parts.append(("checkpoint ", "none of this launch"))
    return _spaced(parts)


def _spaced(parts: Sequence[tuple[str, str]]) -> Text:
    return Text("   ").join([Text.assemble((name, "dim"), value) for name, value in parts])


def _panel(status: RunStatus, *rows: Text) -> Panel:
    return Panel(Group(*rows), title=Text(f"recover-status {status.address}"), title_align="left", expand=False)


def _at_the_end(status: RunStatus) -> list[Text]:
    """Return rows with last iteration, lost workers and age of an ended run; empty if all are unknown."""
    known = []
    if status.iteration and status.training is None:
        known.append(Text.assemble(("last iteration ", "dim"), (str(status.iteration), "bold")))
    if status.world:
        aside = f", {len(status.aside)} set aside at the end" if status.aside else ""
        known.append(Text.assemble(("workers ", "dim"), f"{status.world}, {len(status.lost)} of them lost{aside}"))
    if status.ended_age is not None:
        known.append(Text.assemble(("ended ", "dim"), f"{span(status.ended_age)} ago"))
    return [Text("   ").join(known)] if known else []


def _replicas(status: RunStatus) -> Text:
    if status.replicas_of_launch is None:
        return Text("not known")
    running, launched = len(status.grid), status.replicas_of_launch
    return Text(of_launch(running, launched), "" if running >= launched else "yellow")


def _grid(grid: Sequence[Replica], room: int | None) -> Table:
    if room is None or sum(len(replica.workers) for replica in grid) <= room:
        return _by_worker(grid)
    return _by_replica(grid, room)


def _by_worker(grid: Sequence[Replica]) -> Table:
    quotas = ["quota"] * any(replica.quota is not None for replica in grid)
    table = _table("replica", *quotas, "position", *ACTIVITY)
    for replica in grid:
        head = [str(replica.replica), *([_or_nothing(replica.quota)] if quotas else [])]
        for worker in replica.workers:
            _add(table, *head, _or_nothing(worker.position), *_activity(worker))
            head = [""] * len(head)
    return table


def _by_replica(grid: Sequence[Replica], room: int) -> Table:
    table = _table("replica", "workers", "hosts", "iteration", "phases", "silent")
    for replica in grid[:room]:
        workers = replica.workers
        phases = Counter(worker.phase or "-" for worker in workers).most_common(3)
        silent = max((worker.silence for worker in workers if worker.silence is not None), default=None)
        _add(
            table,
            str(replica.replica),
            str(len(workers)),
            some(sorted({worker.host for worker in workers}), 3),
            str(max(worker.iteration for worker in workers)),
            ", ".join(f"{count} {phase}" for phase, count in phases),
            _silence(silent),
        )
    if len(grid) > room:
        _add(table, "...", "", f"{len(grid) - room} more replicas")
    return table


def _loose(workers: Sequence[WorkerStatus], room: int | None) -> Table:
    table = _table(*ACTIVITY, "note")
    for worker in workers[:room]:
        _add(table, *_activity(worker), worker.note)
    if room is not None and len(workers) > room:
        _add(table, "...", f"{len(workers) - room} more")
    return table


def _gone(gone: Sequence[Gone], room: int | None) -> Table:
    names = ("worker", "host", "", "when", "exit", "last seen in", "why")
    rows: list[list[str | Text]] = []
    latest = sorted(gone, key=lambda worker: (worker.ago is None, worker.ago, worker.worker))
    for worker in latest[:room]:
        style = {"left": "dim", "stopped": "dim", "aside": "yellow"}.get(worker.fate, "red")
        seen = worker.phase + (f" of iteration {worker.iteration}" if worker.phase and worker.iteration else "")
        fate = Text(worker.fate, style)
        rows.append([str(worker.worker), worker.host, fate, _when(worker.ago), worker.exit, seen, worker.why])
    # Columns without any value are left out, to save room on a narrow terminal.
    shown = [at for at in range(len(names)) if any(str(row[at]) for row in rows)]
    table = _table(*(names[at] for at in shown))
    for row in rows:
        _add(table, *(row[at] for at in shown))
    if room is not None and len(gone) > room:
        _add(table, "...", f"{len(gone) - room} more")
    return table


def _faults(faults: Sequence[Fault]) -> Table:
    table = _table("when", "what", "worker", "host", "why")
    for fault in faults:
        _add(table, _when(fault.ago), Text(fault.kind, "red"), _or_nothing(fault.worker), fault.host, fault.why)
    return table


def _recoveries(recoveries: Sequence[RecoveryStatus]) -> Table:
    table = _table("when", "epoch", "workers", "rendezvous", "since fault", "because")
    for plan in recoveries:
        times = [span(plan.rendezvous), span(plan.since_fault)]
        _add(table, _when(plan.ago), str(plan.epoch), str(plan.workers), *times, plan.reason)
    return table


def _activity(worker: WorkerStatus) -> list[str | Text]:
    phase = worker.phase + (f", waits {span(worker.waiting)}" if worker.waiting is not None else "")
    where = [str(worker.worker), worker.node or worker.host, _or_nothing(worker.device), _or_nothing(worker.pid)]
    cells = [*where, str(worker.iteration), phase, _or_nothing(worker.microbatch)]
    return [*cells, _silence(worker.silence)]


def _silence(seconds: float | None) -> Text:
    if seconds is None:
        return Text("not connected", "yellow")
    return Text(span(seconds), "yellow" if seconds > QUIET_SECONDS else "")


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2), collapse_padding=True, header_style="dim")
    for name in columns:
        table.add_column(name, justify="right" if name in NUMBERS else "left", overflow="fold")
    return table


def _add(table: Table, *cells: str | Text) -> None:
    table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))


def _newest[T](entries: Sequence[T], lines: int | None) -> list[T]:
    return list(reversed(entries))[: None if lines is None else 3]


def _lines_of(status: RunStatus) -> int:
    """Return the largest number of lines of all tables except the grid and the unplaced workers."""
    lists = [(status.spares, 9), (status.drains, 9), (status.gone, 9), (status.faults, 3), (status.recoveries, 3)]
    return sum(min(len(entries), most) + 4 for entries, most in lists if entries)


def _when(seconds: float | None) -> str:
    return f"{span(seconds)} ago" if seconds is not None else ""


def _or_nothing(number: int | None) -> str:
    return "" if number is None else str(number)


PIPE_COLUMNS = 160
"""Width of the output if stdout is no terminal, and the environment has no ``COLUMNS``."""


class _Console(Console):
    """Console that raises ``BrokenPipeError`` if its pipe is closed (``| head``); rich would exit with code 1."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        raise  # noqa: PLE0704 - raises the BrokenPipeError that rich is handling


def _console() -> Console:
    """Return a console without markup and highlighting, since members of the run send the displayed data."""
    sized = Console().is_terminal or os.environ.get("COLUMNS", "").isdecimal()
    return _Console(highlight=False, markup=False, width=None if sized else PIPE_COLUMNS)


def show_once(status: RunStatus) -> None:
    _console().print(render(status))


def follow(source: Source, interval: float, patience: float) -> None:
    """Show a view every ``interval`` seconds until the run ends; without a terminal, print the views one by one.

    Raises ``NoAnswer`` or ``AuthenticationError`` if the first view fails, or all views of ``patience`` seconds fail.
    """
    console = _console()
    last: RunStatus | None = None
    answered = time.monotonic()
    with Live(console=console, auto_refresh=False, vertical_overflow="ellipsis") as live:
        while True:
            complaint = ""
            try:
                last = _ended_as_seen(source.look(), last)
                answered = time.monotonic()
            except (NoAnswer, AuthenticationError) as error:  # a coordinator that exits seems to refuse the secret
                silent = time.monotonic() - answered
                if last is None or silent > patience:
                    raise
                complaint = f"no coordinator answers for {silent:.0f} s: {error}"
            if console.is_terminal:
                live.update(render(last, console.height, complaint), refresh=True)
            else:
                console.print(render(last, complaint=complaint))
            if last.code is not None:
                return
            time.sleep(interval)


def _ended_as_seen(status: RunStatus, last: RunStatus | None) -> RunStatus:
    """Return ``status``; if the run has ended, add the details of the previous status ``last``.

    A coordinator that stops sends only the end of the run.
    """
    if status.code is None or last is None:
        return status
    training = status.training or last.training
    code, reason, age = status.code, status.reason, status.ended_age
    return replace(last, state=status.state, code=code, reason=reason, ended_age=age, training=training)
