"""Endurance: eight workers, kills drawn by a seed until one replica is left, and the result is the failure-free one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.forkserver import ForkServer
from tests.instep.cells import EVERYTHING, SEED, row
from tests.instep.conftest import Reference
from tests.instep.runs import Layout, check

pytestmark = pytest.mark.slow

EIGHT = [Layout("dp8", 8, samples=16), Layout("tp2-dp4", 4, tensor=2)]
SEEDS = range(SEED, SEED + (20 if EVERYTHING else 1))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("layout", EIGHT, ids=lambda layout: layout.name)
def test_kills_down_to_the_last_replica_change_nothing_but_rounding(
    forkserver: ForkServer, reference: Reference, tmp_path: Path, layout: Layout, seed: int
) -> None:
    case = row(random.Random(f"soak {layout.name} {seed}"), layout)
    check(case.run(forkserver, tmp_path), reference(case))
