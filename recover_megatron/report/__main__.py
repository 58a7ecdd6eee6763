"""``python -m recover_megatron.report DIR``: print the summary of a run, audit it, draw its loss.

Exit status: 0; 1 if a microbatch was not counted exactly once, or an iteration is missing; 2 if there is no run there.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from recover_megatron.report.command import arguments, audited, refuse, say, tell, where_time_went
from recover_megatron.report.plot import NO_PLOT, plot_loss
from recover_megatron.report.run_dir import NotARun
from recover_megatron.report.summary import summary


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    parser = arguments(
        "python -m recover_megatron.report",
        "Summary of a run, from its log folder; checks that each microbatch was counted exactly once.",
    )
    parser.add_argument("--no-plot", action="store_true", help="do not write DIR/loss.png")
    args = parser.parse_args(argv)
    try:
        run, found = audited(args)
        spent = where_time_went(run)
    except (NotARun, OSError, ValueError) as error:
        return refuse(error)
    say(summary(run, found, spent))
    picture = args.run_dir / "loss.png"
    if not args.no_plot and run.steps:
        try:
            drawn = plot_loss(run, picture)
            say(f"{'plot':<16}{picture if drawn else NO_PLOT}")
        except OSError as error:
            print(f"report: error: cannot write {picture}: {error.strerror}", file=sys.stderr)
    return tell(found)


if __name__ == "__main__":
    sys.exit(main())
