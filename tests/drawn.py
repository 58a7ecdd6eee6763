"""Long families of tests: all of them on demand, some of them, drawn by a seed, in an ordinary run.

``RECOVER_MATRIX=all`` runs every case; otherwise ``RECOVER_SEED`` draws (pytest prints it at the start and at the end,
and each run by hand has another one), so that what one run leaves out another one takes.  CI has one seed (.ci/run):
a change is judged by the cells that the change before it passed.  No case is skipped for any other reason.  All
processes of a run (pytest -n) draw by the seed of the first one.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence

EVERYTHING = os.environ.get("RECOVER_MATRIX") == "all"
SEED = int(os.environ.get("RECOVER_SEED") or random.SystemRandom().randrange(1_000_000))
os.environ["RECOVER_SEED"] = str(SEED)


def some[T](family: str, cases: Sequence[T], count: int) -> list[T]:
    """``count`` of the cases, or all of them, in their order."""
    if EVERYTHING:
        return list(cases)
    chosen = random.Random(f"{family} {SEED}").sample(range(len(cases)), min(count, len(cases)))
    return [cases[at] for at in sorted(chosen)]
