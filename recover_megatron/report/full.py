"""Command ``recover-report DIR``: the complete report of a run as an HTML page, and its pictures as PNG files.

``python -m recover_megatron.report DIR`` writes no page: it prints the summary and the audit, and draws the loss.

Exit status: 0 if all is right; 1 if a microbatch was not counted exactly once, an iteration is missing, or the loss
differs from the reference's by more than rounding; 2 if DIR has no run, or the report cannot be written.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recover_megatron import __version__
from recover_megatron.report import plot
from recover_megatron.report.goodput import accounts
from recover_megatron.report.history import history
from recover_megatron.report.lanes import trace
from recover_megatron.report.page import Report, page
from recover_megatron.report.run_dir import ROUGH, SOON, TOLERANCE, NotARun, RecordedRun, compare, read_run, unfit
from recover_megatron.report.summary import left_out, summary
from recover_megatron.run_log.events import Event, read_run_events

_SHOWN = 20


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser(
        "recover-report",
        "Report of a run as one HTML page: audit, loss next to a reference, replicas and quotas, each recovery.",
    )
    parser.add_argument("--reference", type=Path, metavar="DIR2", help="log folder of a run without failures")
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="largest allowed relative difference from the reference's loss when the replicas change, and in the next "
        f"{SOON - 1} iterations (in the latter {ROUGH} times X for bf16, fp16 or fp8); default: {TOLERANCE:g}",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="page (default: DIR/report.html); PNGs go next to it")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write the recoveries in the Chrome trace format, and no page"
    )
    args = parser.parse_args(argv)
    if args.trace is not None:
        if unused := [
            f"--{name}" for name in ("out", "reference", "tolerance", "corpus", "microbatches") if getattr(args, name)
        ]:
            parser.error(f"--trace writes no page: leave out {', '.join(unused)}, or --trace")
        return _trace(args.run_dir, args.trace)
    if args.tolerance is not None and not (args.reference and 0 <= args.tolerance < 1):
        parser.error("--tolerance: give a number from 0 to 1, with --reference DIR2")
    tolerance = TOLERANCE if args.tolerance is None else args.tolerance
    try:
        run, found = _audited(args)
        reference = read_run(args.reference) if args.reference else None
        if reference and (why := unfit(run.steps, reference.steps)):
            raise NotARun(f"--reference {args.reference} is not a run of the same training: {why}")
        with _schema(args.run_dir):
            workers, coordinators, chaos = run.events
            report = Report(
                run=run,
                violations=found,
                history=history(workers, coordinators, chaos),
                reference=reference,
                comparison=compare(run.steps, reference.steps, tolerance, rough=_is_rough(workers))
                if reference
                else None,
                events=workers,
                coordinators=coordinators,
                spent=accounts(run.steps, workers, coordinators),
            )
    except (NotARun, OSError, ValueError) as error:
        return _refuse(error)
    out = args.out or args.run_dir / "report.html"
    try:
        drawn = pictures(report, out)
        _write(out, page(report, drawn))
    except OSError as error:
        elsewhere = "" if args.out else "; choose another file for the page with --out FILE"
        return _refuse(f"cannot write {error.filename or out}: {error.strerror}{elsewhere}")
    _print_line(summary(run, found, report.spent))
    if report.comparison is not None:
        _print_line(f"{'reference':<16}{_reference(report)}")
    if report.run.steps and not drawn:
        _print_line(f"{'pictures':<16}{plot.NO_PLOT}")
    _print_line(f"{'report':<16}{out}")
    return _print_findings([*found, *(report.comparison.unlike if report.comparison else [])])


def without_page(argv: Sequence[str] | None = None) -> int:
    parser = _parser(
        "python -m recover_megatron.report",
        "Summary of a run, from its log folder; checks that each microbatch was counted exactly once.",
    )
    parser.add_argument("--no-plot", action="store_true", help="do not write DIR/loss.png")
    args = parser.parse_args(argv)
    try:
        run, found = _audited(args)
        with _schema(args.run_dir):
            spent = accounts(run.steps, *run.events[:2])
    except (NotARun, OSError, ValueError) as error:
        return _refuse(error)
    _print_line(summary(run, found, spent))
    picture = args.run_dir / "loss.png"
    if not args.no_plot and run.steps:
        try:
            drawn = plot.save(picture, lambda axes: plot.draw_loss(axes[0], run), [4.5])
            _print_line(f"{'plot':<16}{picture if drawn else plot.NO_PLOT}")
        except OSError as error:
            _refuse(f"cannot write {picture}: {error.strerror}")
    return _print_findings(found)


def _parser(program: str, description: str) -> argparse.ArgumentParser:
    """Return a parser with the arguments that are common to both commands of this module."""
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument("run_dir", type=Path, metavar="DIR", help="folder with steps.jsonl (--recover-log-dir)")
    parser.add_argument("--corpus", type=Path, metavar="FILE", help="path of corpus.json (default: DIR/corpus.json)")
    parser.add_argument("--microbatches", type=int, metavar="M", help="microbatches per iteration, if known")
    return parser


def _audited(args: argparse.Namespace) -> tuple[RecordedRun, list[str]]:
    """Return the run and the findings of its audit.  Raises NotARun or OSError if the run cannot be read."""
    run = read_run(args.run_dir, args.corpus)
    return run, run.audit(args.microbatches)


def _is_rough(events: Sequence[Event]) -> bool:
    """Return whether the model computes in 16 bits or fewer, from the field ``bits`` of the event ``start``.

    Older versions wrote no ``bits``: then the field ``argv`` is used.
    """
    start = next((event for event in events if event["event"] == "start"), {})
    flags = [str(word).startswith(("--bf16", "--fp16", "--fp8", "--fp4")) for word in start.get("argv") or ()]
    return bool(start.get("bits", 16 if any(flags) else 32) < 32)


@contextmanager
def _schema(folder: Path) -> Iterator[None]:
    """Raise ValueError if an event that is read inside this context lacks a field, or a field has a wrong type."""
    try:
        yield
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"an event in {folder} does not match the schema: {error!r}") from error


def _refuse(error: object) -> int:
    """Print ``error``; return 2, the exit status of a failed report."""
    print(f"recover-report: error: {error}", file=sys.stderr)
    return 2


def _print_line(text: str) -> None:
    """Print a line; a failure to print it (closed pipe, full disk) does not change the exit status."""
    try:
        print(text, flush=True)
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            _refuse(f"cannot write the summary: {error.strerror}")
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the process ends


def _print_findings(found: Sequence[str]) -> int:
    """Print the first findings of the audit; return the exit status: 1 if there are findings, else 0."""
    for problem in found[:_SHOWN]:
        print(f"recover-report: {problem}", file=sys.stderr)
    if len(found) > _SHOWN:
        print(f"recover-report: and {len(found) - _SHOWN} more", file=sys.stderr)
    return 1 if found else 0


def _write(out: Path, text: str) -> None:
    """Write ``text`` to ``out`` atomically, so that a browser never loads half a page.  Raises OSError."""
    if out.is_symlink() or (out.exists() and not out.is_file()):  # do not replace a link, a device or a pipe
        out.write_text(text, encoding="utf-8")
        return
    draft = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(out)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(out)) from error


def _trace(folder: Path, out: Path) -> int:
    try:
        spoiled: list[str] = []
        workers, coordinators, _ = read_run_events(folder, spoiled)
        if not workers and not coordinators:
            raise NotARun(f"{folder} has no events of a run")
        with _schema(folder):
            trace_object = trace(workers, coordinators, folder.resolve().name)
    except (NotARun, OSError, ValueError) as error:
        return _refuse(error)
    try:
        _write(out, json.dumps(trace_object))
    except OSError as error:
        return _refuse(f"cannot write {out}: {error.strerror}")
    _print_line(f"{out}: {len(trace_object['traceEvents'])} entries; open it in https://ui.perfetto.dev")
    if spoiled:
        _print_line(f"left out: {left_out(spoiled)}")
    return 0


def pictures(report: Report, out: Path) -> dict[str, Path]:
    """Draw all pictures as PNGs next to ``out``; return title -> file.  Raises OSError.

    If matplotlib is missing, or the run has no steps, draw nothing and return {}.
    """
    steps, comparison = report.run.steps, report.comparison
    if not steps:
        return {}

    def loss(axes: Sequence[Any]) -> None:
        plot.draw_loss(axes[0], report.run, report.reference)
        if comparison is not None and comparison.losses:
            plot.draw_difference(axes[1], comparison)
            axes[1].sharex(axes[0])

    def replicas(axes: Sequence[Any]) -> None:
        plot.draw_replicas(axes[0], steps)
        plot.draw_quotas(axes[1], steps)
        axes[0].sharex(axes[1])

    with_reference = comparison is not None and bool(comparison.losses)
    wanted: list[tuple[str, str, Callable[[Sequence[Any]], None], list[float]]] = [
        ("Loss", "loss", loss, [3.8, 1.6] if with_reference else [4.2]),
        ("Replicas and their microbatches", "replicas", replicas, [1.3, 2.7]),
        ("Throughput", "throughput", lambda axes: plot.draw_throughput(axes[0], steps), [3.0]),
    ]
    timed = [recovery for recovery in report.history.recoveries if recovery.seconds]
    if timed:
        height = 1.3 + 0.33 * min(len(timed), plot.MAX_BARS)
        bars = ("Time of each recovery", "recoveries", lambda axes: plot.draw_recoveries(axes[0], timed), [height])
        wanted.insert(2, bars)
    drawn = {}
    for title, name, draw, heights in wanted:
        path = out.with_name(f"{out.stem}-{name}.png")
        if plot.save(path, draw, heights):
            drawn[title] = path
    return drawn


def _reference(report: Report) -> str:
    assert report.comparison is not None
    worst = report.comparison.worst_loss
    if worst is None:
        return "no iteration in common"
    return (
        f"largest relative difference of the loss {worst.relative:.2e}, in iteration {worst.iteration}; "
        f"{report.comparison.iterations} iterations compared"
    )


if __name__ == "__main__":
    sys.exit(main())
