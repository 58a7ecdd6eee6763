"""What both commands of the report share: their arguments, reading and auditing, telling what is wrong."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from recover_megatron import __version__
from recover_megatron.report.run_dir import NotARun, RecordedRun, read_run
from recover_megatron.run_log.audit import violations

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


def refuse(error: NotARun | OSError | ValueError) -> int:
    """Tell that there is no run to report on; returns the exit status."""
    print(f"report: error: {error}", file=sys.stderr)
    return 2


def tell(found: Sequence[str]) -> int:
    """Print what the audit found; returns the exit status."""
    for problem in found[:_SHOWN]:
        print(f"report: {problem}", file=sys.stderr)
    if len(found) > _SHOWN:
        print(f"report: and {len(found) - _SHOWN} more", file=sys.stderr)
    return 1 if found else 0
