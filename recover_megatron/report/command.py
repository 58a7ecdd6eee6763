"""What both commands of the report share: their arguments, reading and auditing, telling what is wrong."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from recover_megatron import __version__
from recover_megatron.report.goodput import Account, accounts
from recover_megatron.report.run_dir import NotARun, RecordedRun, read_run
from recover_megatron.run_log.audit import violations
from recover_megatron.run_log.events import read_run_events

_SHOWN = 20


def arguments(program: str, description: str) -> argparse.ArgumentParser:
    """A parser with the arguments that both have."""
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument("run_dir", type=Path, metavar="DIR", help="folder with steps.jsonl (--recover-log-dir)")
    parser.add_argument("--corpus", type=Path, metavar="FILE", help="corpus.json (default: the one in DIR, if any)")
    parser.add_argument("--microbatches", type=int, metavar="M", help="microbatches of an iteration, if known")
    return parser


def audited(args: argparse.Namespace) -> tuple[RecordedRun, list[str]]:
    """The run and what the audit found.  Raises NotARun, OSError."""
    run = read_run(args.run_dir, args.corpus)
    return run, violations(run.steps, args.microbatches or run.settings.get("microbatches"))


def where_time_went(run: RecordedRun) -> list[Account]:
    """Of the whole run; empty where its files do not tell.  Raises OSError, ValueError for a damaged event."""
    try:
        workers, coordinators, _ = read_run_events(run.folder)
        return accounts(run.steps, workers, coordinators)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"an event in {run.folder} does not keep to the schema: {error!r}") from error


def refuse(error: NotARun | OSError | ValueError) -> int:
    """Tell that there is no run to report on; returns the exit status."""
    print(f"report: error: {error}", file=sys.stderr)
    return 2


def say(text: str) -> None:
    """Print a line; what cannot be printed (nobody reads any more, a full disk) changes no exit status."""
    try:
        print(text, flush=True)
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            print(f"report: error: cannot write the summary: {error.strerror}", file=sys.stderr)
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the process ends


def tell(found: Sequence[str]) -> int:
    """Print what the audit found; returns the exit status."""
    for problem in found[:_SHOWN]:
        print(f"report: {problem}", file=sys.stderr)
    if len(found) > _SHOWN:
        print(f"report: and {len(found) - _SHOWN} more", file=sys.stderr)
    return 1 if found else 0
