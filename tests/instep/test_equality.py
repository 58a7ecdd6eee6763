"""The invariant, by equality: a run in which workers die is the run in which none does, but for rounding.

Real processes, killed by real signals at every phase of an iteration.  See ``cells`` for what is drawn, ``runs`` for
what is compared.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.forkserver import ForkServer
from tests.instep.cells import EVERYTHING, IN_THE_MAIN_THREAD, SEED, Cell, case_of, cells, drawn, rows
from tests.instep.conftest import Reference
from tests.instep.runs import LAYOUTS, Case, check

pytestmark = pytest.mark.slow

DP4, OVERLAP, TP2, PP2, TP2_PP2 = LAYOUTS
CELLS = cells() if EVERYTHING else drawn(SEED)
KINDS = [
    Cell(layout, phase, 0, "later", False, kind)
    for kind in ("stop", "raise", "exit")
    for layout in (DP4, PP2)
    for phase in IN_THE_MAIN_THREAD
]
ROWS = list(itertools.islice(rows(SEED), 100 if EVERYTHING else 6))


def equal(forkserver: ForkServer, reference: Reference, case: Case, out: Path) -> None:
    check(case.run(forkserver, out), reference(case))


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_death_at_any_phase_changes_nothing_but_rounding(
    forkserver: ForkServer, reference: Reference, tmp_path: Path, cell: Cell
) -> None:
    equal(forkserver, reference, case_of(cell, SEED), tmp_path)


@pytest.mark.parametrize("cell", KINDS if EVERYTHING else KINDS[SEED % 9 :: 9], ids=str)
def test_hangs_exceptions_and_exits_are_survived_as_kills_are(
    forkserver: ForkServer, reference: Reference, tmp_path: Path, cell: Cell
) -> None:
    equal(forkserver, reference, case_of(cell, SEED), tmp_path)


@pytest.mark.parametrize("case", ROWS, ids=str)
def test_deaths_down_to_one_replica_change_nothing_but_rounding(
    forkserver: ForkServer, reference: Reference, tmp_path: Path, case: Case
) -> None:
    equal(forkserver, reference, case, tmp_path)
