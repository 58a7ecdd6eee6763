"""What a run of the tests chooses: CI's list with one seed, all tests with a seed of their own, or every case.

    scripts/test.sh                      what CI runs (tests/ci.toml); long families are drawn by ``CI_SEED``
    scripts/test.sh --all                all tests; long families are drawn by ``RECOVER_SEED``, another one each time
    RECOVER_MATRIX=all, with --all       every case of every family: hours

So a change is judged by the cells that the change before it passed, and a run by hand looks for more.  The seed is
printed at the start and at the end.  All processes of a run (pytest -n) draw by the seed of the first one.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence

CI_SEED = 971314
"""Changed by a commit alone."""
EVERYTHING = os.environ.get("RECOVER_MATRIX") == "all"
ALL = EVERYTHING or os.environ.get("RECOVER_TESTS") == "all"
"""Whether tests that CI's list does not have run, too."""
SEED = int(os.environ.get("RECOVER_SEED") or random.SystemRandom().randrange(1_000_000)) if ALL else CI_SEED
os.environ["RECOVER_SEED"] = str(SEED)


def some[T](family: str, cases: Sequence[T], count: int) -> list[T]:
    """``count`` of the cases, or all of them, in their order."""
    if EVERYTHING:
        return list(cases)
    chosen = random.Random(f"{family} {SEED}").sample(range(len(cases)), min(count, len(cases)))
    return [cases[at] for at in sorted(chosen)]
