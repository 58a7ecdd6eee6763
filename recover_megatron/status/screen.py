"""A ``Status`` as something that rich prints: pure; whatever members sent is ``Text``, never markup."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from recover_megatron.status.model import Fault, Gone, RecoveryStatus, Replica, RunStatus, WorkerStatus

QUIET_SECONDS = 3.0
"""A worker that is silent for longer is shown in colour: a heartbeat a second is usual."""
_TERM_COUNTER = 32  # bits of a term that only make it unlike any other


def render(status: RunStatus, lines: int | None = None, complaint: str = "") -> RenderableType:
    """The whole view; ``lines``: how many there is room for (None: any number), ``complaint``: why it is not newer."""
    parts: list[RenderableType] = [_headline(status, complaint)]
    if status.stall is not None:
        parts += [Text(f"  {where}", "yellow") for where in status.stall.where]
        left = f"they are put out if they are not back in {ago(status.stall.left)} (--recover-stall-timeout)"
        parts.append(Text(f"  {left}", "dim"))
    few = None if lines is None else 8
    room = None if lines is None else max(4, lines - 9 - _lines_of(status))
    if status.grid:
        parts.append(_titled("grid", _grid(status.grid, room)))
    if status.unplaced:
        parts.append(_titled("workers, of which no replica is known", _loose(status.unplaced, room)))
    if status.spares:
        parts.append(_titled("spares", _loose(status.spares, few)))
    if status.gone:
        parts.append(_titled("gone", _gone(status.gone, few)))
    if status.faults:
        parts.append(_titled("last faults", _faults(_newest(status.faults, lines))))
    if status.recoveries:
        parts.append(_titled("last plans", _recoveries(_newest(status.recoveries, lines))))
    if status.hidden:
        parts.append(Text(f"{status.hidden} more workers are not told of", style="dim"))
    return Group(*parts)


def ago(seconds: float | None) -> str:
    """A time span in a few characters; empty for None."""
    if seconds is None:
        return ""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def state(status: RunStatus) -> Text:
    """What the run does, in words."""
    if status.code is not None:
        verdict = "finished" if status.code == 0 else "ended"
        return Text(f"{verdict}, exit code {status.code}: {status.reason}", "green" if status.code == 0 else "bold red")
    if status.state == "standby":
        return Text(f"no coordinator leads: {status.attached} of {status.world} workers have come", "yellow")
    if status.stall is not None:
        who = f"workers {_some(status.stall.workers)}" if len(status.stall.workers) > 1 else "a worker"
        return Text(f"STALLED for {ago(status.stall.seconds)}: waits for {who}", "bold yellow")
    if status.state == "gathering":
        return Text("a new coordinator waits for all to come to it", "yellow")
    if status.state == "rendezvous":
        what = f"opens epoch {status.opened}" if status.epoch else "starts"
        who = f", waits for {_some(status.awaited)}" if status.awaited else ""
        return Text(what + who, "yellow")
    return Text("running" if status.state == "steady" else status.state, "green")


def _headline(status: RunStatus, complaint: str) -> Panel:
    first = Text.assemble(state(status), f"   epoch {status.epoch}", f"   term {status.term >> _TERM_COUNTER}")
    if status.code is not None:
        return _panel(status, first, *_at_the_end(status))
    second = Text.assemble(("iteration ", "dim"), (str(status.iteration), "bold"))
    second.append_text(Text.assemble(("   replicas ", "dim"), _replicas(status)))
    second.append_text(Text.assemble(("   workers ", "dim"), f"{status.live} of {status.world}"))
    commit = f"   committed decision {status.committed}"
    second.append(commit + (f", {ago(status.commit_age)} ago" if status.commit_age is not None else ""))
    return _panel(status, first, second, *([Text(complaint, "bold red")] if complaint else []))


def _panel(status: RunStatus, *rows: Text) -> Panel:
    return Panel(Group(*rows), title=Text(f"recover-status {status.address}"), title_align="left", expand=False)


def _at_the_end(status: RunStatus) -> list[Text]:
    """Of a run that has ended: what is known of it, which is nothing where only its coordinator was asked."""
    known = []
    if status.iteration:
        known.append(Text.assemble(("last iteration ", "dim"), (str(status.iteration), "bold")))
    if status.world:
        known.append(Text.assemble(("workers ", "dim"), f"{status.world}, {len(status.gone)} of them lost"))
    return [Text("   ").join(known)] if known else []


def _replicas(status: RunStatus) -> Text:
    if status.replicas_of_launch is None:
        return Text("not told")
    running = len(status.grid)
    return Text(f"{running} of {status.replicas_of_launch}", "" if running == status.replicas_of_launch else "yellow")


def _grid(grid: Sequence[Replica], room: int | None) -> Table:
    if room is None or sum(len(replica.workers) for replica in grid) <= room:
        return _by_worker(grid)
    return _by_replica(grid, room)


def _by_worker(grid: Sequence[Replica]) -> Table:
    quotas = ["quota"] * any(replica.quota is not None for replica in grid)
    table = _table("replica", *quotas, "position", "worker", "host", "iteration", "phase", "microbatch", "silent")
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
            _some(sorted({worker.host for worker in workers}), 3),
            str(max(worker.iteration for worker in workers)),
            ", ".join(f"{count} {phase}" for phase, count in phases),
            _silence(silent),
        )
    if len(grid) > room:
        _add(table, "...", "", f"{len(grid) - room} more replicas")
    return table


def _loose(workers: Sequence[WorkerStatus], room: int | None) -> Table:
    table = _table("worker", "host", "iteration", "phase", "microbatch", "silent", "note")
    for worker in workers[:room]:
        _add(table, *_activity(worker), worker.note)
    if room is not None and len(workers) > room:
        _add(table, "...", f"{len(workers) - room} more")
    return table


def _gone(gone: Sequence[Gone], room: int | None) -> Table:
    table = _table("worker", "host", "", "when", "why")
    latest = sorted(gone, key=lambda worker: (worker.ago is None, worker.ago, worker.worker))
    for worker in latest[:room]:
        style = "dim" if worker.fate == "left" else "red"
        _add(table, str(worker.worker), worker.host, Text(worker.fate, style), _when(worker.ago), worker.why)
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
        times = [ago(plan.rendezvous), ago(plan.since_fault)]
        _add(table, _when(plan.ago), str(plan.epoch), str(plan.workers), *times, plan.reason)
    return table


def _activity(worker: WorkerStatus) -> list[str | Text]:
    phase = worker.phase + (f", waits {ago(worker.waiting)}" if worker.waiting is not None else "")
    told = [str(worker.worker), worker.host, str(worker.iteration), phase, _or_nothing(worker.microbatch)]
    return [*told, _silence(worker.silence)]


def _silence(seconds: float | None) -> Text:
    if seconds is None:
        return Text("not connected", "yellow")
    return Text(ago(seconds), "yellow" if seconds > QUIET_SECONDS else "")


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2), collapse_padding=True, header_style="dim")
    for name in columns:
        numeric = name in ("replica", "quota", "position", "worker", "iteration", "microbatch", "workers", "epoch")
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    return table


def _titled(title: str, table: Table) -> RenderableType:
    return Group(Text(), Text(title, "bold"), table)


def _add(table: Table, *cells: str | Text) -> None:
    table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))


def _newest[T](entries: Sequence[T], lines: int | None) -> list[T]:
    return list(reversed(entries))[: None if lines is None else 3]


def _lines_of(status: RunStatus) -> int:
    """How many lines all but the grid takes."""
    lists = [(status.spares, 9), (status.gone, 9), (status.faults, 3), (status.recoveries, 3)]
    return sum(min(len(entries), most) + 4 for entries, most in lists if entries)


def _when(seconds: float | None) -> str:
    return f"{ago(seconds)} ago" if seconds is not None else ""


def _or_nothing(number: int | None) -> str:
    return "" if number is None else str(number)


def _some(things: Sequence[object], most: int = 8) -> str:
    shown = ", ".join(map(str, things[:most]))
    return f"{shown} and {len(things) - most} more" if len(things) > most else shown
