"""RECOVER_SOAK=N python -m pytest tests/soak: N kills and rejoins in one run; as many as growth shows in without it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.drawn import SEED
from tests.soak.soak import MIB, Sample, Soak, growth

KILLS = int(os.environ.get("RECOVER_SOAK", "15"))


@pytest.mark.slow
@pytest.mark.skipif(not KILLS, reason="RECOVER_SOAK=0")
def test_a_run_survives_kill_after_kill_and_nothing_grows_or_changes_but_by_rounding(tmp_path: Path) -> None:
    report = Soak(tmp_path, KILLS, SEED).run()
    print(report)
    assert report.kills == KILLS
    assert report.problems == []
    judged = {process.split(" ")[0] for process in report.judged}
    assert judged >= {"launcher", "coordinator", "worker"} or KILLS < 15, report


def samples(grown: dict[str, float], count: int = 40) -> list[Sample]:
    return [
        Sample(
            "worker 0", 1, n, n,
            memory=int(200 * MIB + n * grown.get("memory", 0)),
            descriptors=int(30 + n % 3 + n * grown.get("descriptors", 0)),
            threads=int(9 + n * grown.get("threads", 0)),
            files=int(n * grown.get("files", 0)),
            seconds=float(n),
        )
        for n in range(count)
    ]  # fmt: skip


def test_what_goes_up_and_down_is_no_growth() -> None:
    assert growth(samples({})) == []


@pytest.mark.parametrize(
    ("what", "each", "count"),
    [
        ("memory", MIB, 40), ("descriptors", 0.5, 40), ("threads", 0.2, 40), ("files", 0.2, 40),
        ("memory", 4 * MIB, 9), ("descriptors", 1, 9), ("threads", 1, 9), ("files", 1, 9),
    ],
)  # fmt: skip
def test_a_little_of_anything_kept_at_each_recovery_is_found(what: str, each: float, count: int) -> None:
    """In the soak of ``--all``, too: of the coordinator that leads for the rest of it there are nine samples or so."""
    assert [what in problem for problem in growth(samples({what: each}, count))] == [True]


@pytest.mark.parametrize("what", ["seconds", "logs"])
def test_recoveries_that_take_longer_and_longer_or_write_more_and_more_are_found(what: str) -> None:
    slower = [replace(Sample("worker 0", 1, n, n, 1, 1, 1, 1.0), **{what: n * n * 100}) for n in range(200)]
    assert [what in problem for problem in growth(slower)] == [True]
