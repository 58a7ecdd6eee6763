"""What an interleaved pipeline schedule can run: how many microbatches, and in groups of what size.

Such a schedule sends a *group* of microbatches through a stage's first chunk of layers, then the same group through its
second chunk, and so on; then comes the next group.  The last group may be smaller.  A microbatch leaves the last stage
no sooner than ``stages`` microbatches after it entered the first one, so no group may be smaller than ``stages``:

    8 microbatches on 4 stages in groups of 4:   4, 4
    9 microbatches                          4:   4, 4, 1   refused: the last group is too small
                                            5:   5, 4
    7 microbatches                          7:   7         one group always does

Hence any number of microbatches from ``stages`` on can be run, if the size of the groups may change with the number.
Larger groups keep more activations at once: (chunks - 1) * group size + 2 * stages - 1 chunks' at the first stage.  How
long a pass takes does not depend on it.
"""

from __future__ import annotations


def runs(count: int, stages: int, group: int) -> bool:
    """Whether a schedule of ``stages`` stages can run ``count`` microbatches in groups of ``group``."""
    rest = count % group
    return stages <= group <= count and (rest == 0 or rest >= stages)


def group_size(count: int, stages: int, usual: int) -> int:
    """The size of the groups for ``count`` microbatches on ``stages`` stages; ``usual``: as the user wants them.

    The usual size if that can be, else the largest below it, else the smallest above it: never more activations at once
    than usual where that can be avoided.

    Raises ValueError for fewer microbatches than stages.
    """
    if not 1 <= stages <= count:
        raise ValueError(f"an interleaved schedule of {stages} stages cannot run {count} microbatches")
    smaller, larger = range(min(usual, count), stages - 1, -1), range(max(usual + 1, stages), count + 1)
    return next(group for group in (*smaller, *larger) if runs(count, stages, group))
