"""``python -m recover_megatron.report RUN_DIR``: print the summary of a run, audit it, draw its loss.

Exit status: 0; 1 if a microbatch was not counted exactly once, or an iteration is missing; 2 if there is no run there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from recover_megatron.report.audit import violations
from recover_megatron.report.plot import plot_loss
from recover_megatron.report.run_dir import NotARun, read_run
from recover_megatron.report.summary import summary

_SHOWN = 20


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m recover_megatron.report",
        description="Summary of a run, from its log folder; checks that each microbatch was counted exactly once.",
    )
    parser.add_argument("run_dir", type=Path, help="folder with steps.jsonl (--recover-log-dir)")
    parser.add_argument("--corpus", type=Path, metavar="FILE", help="corpus.json (default: the one in RUN_DIR, if any)")
    parser.add_argument("--microbatches", type=int, metavar="M", help="microbatches of an iteration, if known")
    parser.add_argument("--no-plot", action="store_true", help="do not write RUN_DIR/loss.png")
    args = parser.parse_args(argv)
    try:
        run = read_run(args.run_dir, args.corpus)
    except (NotARun, OSError) as error:
        print(f"report: error: {error}", file=sys.stderr)
        return 2
    found = violations(run.steps, args.microbatches or run.settings.get("microbatches"))
    print(summary(run, found))
    picture = args.run_dir / "loss.png"
    if not args.no_plot and run.steps:
        try:
            drawn = plot_loss(run, picture)
            print(f"{'plot':<16}{picture if drawn else 'none: matplotlib is not installed'}")
        except OSError as error:
            print(f"report: error: cannot write {picture}: {error.strerror}", file=sys.stderr)
    for problem in found[:_SHOWN]:
        print(f"report: {problem}", file=sys.stderr)
    if len(found) > _SHOWN:
        print(f"report: and {len(found) - _SHOWN} more", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
