"""RECOVER_SOAK=N python -m pytest tests/soak: N kills and rejoins in one run; a few without it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.drawn import SEED
from tests.soak.soak import MIB, Sample, Soak, growth

KILLS = int(os.environ.get("RECOVER_SOAK", "2"))


@pytest.mark.slow
@pytest.mark.skipif(not KILLS, reason="RECOVER_SOAK=0")
def test_a_run_survives_kill_after_kill_and_nothing_grows_or_changes_but_by_rounding(tmp_path: Path) -> None:
    report = Soak(tmp_path, KILLS, SEED).run()
    print(report)
    assert report.kills == KILLS
    assert report.problems == []


def samples(grown: dict[str, float], count: int = 40) -> list[Sample]:
    return [
        Sample(
            "worker 0", 1, n, n,
            memory=int(200 * MIB + n * grown.get("memory", 0)),
            descriptors=int(30 + n % 3 + n * grown.get("descriptors", 0)),
            threads=int(9 + n * grown.get("threads", 0)),
            seconds=float(n),
        )
        for n in range(count)
    ]  # fmt: skip


def test_what_goes_up_and_down_is_no_growth() -> None:
    assert growth(samples({})) == []


@pytest.mark.parametrize(("what", "each"), [("memory", MIB), ("descriptors", 0.5), ("threads", 0.2)])
def test_a_little_of_anything_kept_at_each_recovery_is_found(what: str, each: float) -> None:
    assert [what in problem for problem in growth(samples({what: each}))] == [True]


def test_recoveries_that_take_longer_and_longer_are_found() -> None:
    slower = [Sample("worker 0", 1, n, n, 1, 1, 1, n * n * 0.01) for n in range(200)]
    assert [problem for problem in growth(slower) if "processor seconds" in problem]
