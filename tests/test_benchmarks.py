"""Benchmarks that no other test runs still run, on very little; what they find is no matter of tests."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import TextIO

import pytest
import torch

from benchmarks import bench_elastic, bench_host_cost, bench_recovery, bench_step_recovery
from benchmarks.megatron_runs import forked, strike
from recover_megatron.collectives.group import Memo
from tests.harness import REPOSITORY
from tests.harness.processes import python


@pytest.mark.slow
def test_a_recovery_of_plain_processes_is_measured_phase_by_phase() -> None:
    little = ["--workers", 3, "--kills", 1, "--resident", 0.25, "--beside", "gloo"]
    done = python("benchmarks/bench_recovery.py", *little, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line for line in done.stdout.splitlines() if line.startswith("| 3 |")]
    assert [row.split(" | ")[1:4] for row in rows] == [
        ["0.25", way, "1"] for way in ("pidfd", "mutex", "gloo, pidfd", "gloo, mutex")
    ]
    for row in rows:
        *phases, total = (float(cell) for cell in re.findall(r"([0-9.]+) \(", row))
        assert len(phases) == (5 if "gloo" in row else 6)
        assert total == pytest.approx(sum(phases), abs=0.5)
        assert total > 0


def test_each_phase_ends_with_the_last_survivor_and_one_that_was_over_before_takes_no_time() -> None:
    survivors = [
        {"revoke": 10.003, "unwind": 10.002, "rendezvous": 10.007, "regroup": 10.008, "reduce": 10.009},
        {"revoke": 10.004, "unwind": 10.001, "rendezvous": 10.006, "regroup": 10.011, "reduce": 10.010},
    ]
    found = bench_recovery.phases(10.0, {"detect": 10.002}, survivors)
    expected = {"detect": 2, "revoke": 2, "unwind": 0, "rendezvous": 3, "regroup": 4, "reduce": 0, "total": 11}
    assert found == pytest.approx(expected)


def test_a_survivor_that_had_nothing_to_interrupt_does_not_count_for_that_phase() -> None:
    survivors = [{"revoke": 1.001, "reduce": 1.005}, {"revoke": 1.002, "unwind": 1.003, "reduce": 1.004}]
    found = bench_recovery.phases(1.0, {}, survivors)
    assert found == pytest.approx({"revoke": 2, "unwind": 1, "reduce": 2, "total": 5})
    without = bench_recovery.phases(1.0, {}, survivors[:1])
    assert without == pytest.approx({"revoke": 1, "reduce": 4, "total": 5})


def test_the_ways_are_compared_with_one_of_them_for_each_number_of_workers_and_each_size() -> None:
    kills = [
        {"workers": 4, "GiB": gib, "way": way, "detect": ms - 1, "total": ms}
        for gib, way, ms in [(0, "pidfd", 30), (0, "mutex", 10), (0, "pidfd", 50), (0, "mutex", 30), (1, "mutex", 5)]
    ]
    kills.append({"workers": 4, "GiB": 1, "way": "torchft, tuned", "total": 500})
    nothing = [""] * 5
    assert bench_recovery.summary(kills, "mutex") == [
        [4, "0", "pidfd", 2, "39.0 (49.0)", *nothing, "40.0 (50.0)", "2.00"],
        [4, "0", "mutex", 2, "19.0 (29.0)", *nothing, "20.0 (30.0)", "1.00"],
        [4, "1", "mutex", 1, "4.0 (4.0)", *nothing, "5.0 (5.0)", "1.00"],
        [4, "1", "torchft, tuned", 1, "", *nothing, "500.0 (500.0)", "100.00"],
    ]


def test_the_recoveries_of_a_step_are_compared_for_each_size() -> None:
    def recovery(gib: float, tell: str, without_rerun: float) -> dict[str, object]:
        return dict.fromkeys(bench_step_recovery.COLUMNS, 1.0) | {
            "GiB": gib, "tell": tell, "without rerun": without_rerun,
        }  # fmt: skip

    found = [recovery(0, "pidfd", 30.0), recovery(0, "mutex", 20.0), recovery(0, "mutex", 40.0)]
    found += [recovery(1, "pidfd", 300.0), recovery(1, "mutex", 60.0)]
    rows = bench_step_recovery.summary(found, "mutex")
    assert [(*row[:3], row[-3], row[-1]) for row in rows] == [
        ("0", "pidfd", "median (maximum)", "30.0 (30.0)", "1.00"),
        ("0", "mutex", "median (maximum)", "30.0 (40.0)", "1.00"),
        ("1", "pidfd", "median (maximum)", "300.0 (300.0)", "5.00"),
        ("1", "mutex", "median (maximum)", "60.0 (60.0)", "1.00"),
    ]


def test_a_recovery_counts_from_the_kill_to_what_each_survivor_reports_next() -> None:
    reading, writing = os.pipe()

    def work(me: int, report: TextIO) -> None:
        print(file=report)
        if me == 0:
            signal.pause()
        os.close(writing)
        os.read(reading, 1)  # returns when the other one has ended
        print(json.dumps({"reduce": time.monotonic()}), file=report)

    with forked(2, work) as (pids, reports), os.fdopen(reading):
        os.close(writing)
        at, (survivor,) = strike(pids, reports, victim=0, pause=0.0)
    assert at < survivor["reduce"] < time.monotonic()


def test_a_worker_that_ends_before_it_is_killed_is_an_error() -> None:
    with (
        forked(2, lambda me, report: None if me else print(file=report)) as (pids, reports),
        pytest.raises(RuntimeError, match="worker 1 exited before it reported"),
    ):
        strike(pids, reports, victim=0, pause=0.0)


LITTLE = ["--members", "3", "--buckets", "2", "--iterations", "2"]


def test_the_host_costs_are_told_and_judged_by_the_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = tmp_path / "costs.json"
    assert bench_host_cost.main([*LITTLE, "--most", "1e9", "--json", str(told)]) == 0
    numbers = json.loads(told.read_text())["us_per_bucket"]
    assert set(numbers) == {"native", "ring"}
    printed = capsys.readouterr().out
    for name, number in numbers.items():
        assert number > 0
        assert f"{name:8} {number:7.1f} us per bucket" in printed


def test_one_group_over_the_limit_is_enough_to_fail(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_host_cost.main([*LITTLE, "--most", "1e-6"]) == 1
    assert "more than 1e-06 us per bucket: native, ring" in capsys.readouterr().err


def test_a_result_is_made_once_and_all_are_forgotten_when_they_weigh_too_much() -> None:
    made: list[str] = []

    def make(text: str) -> str:
        made.append(text)
        return text

    memo: Memo[str] = Memo(4, len)
    for text in ("ab", "cd", "ab", "cd"):
        assert memo.get(text, lambda text=text: make(text)) == text  # type: ignore[misc]
    assert (made, len(memo)) == (["ab", "cd"], 2)
    assert memo.get("e", lambda: make("e")) == "e"
    assert len(memo) == 1
    assert memo.get("longer", lambda: make("longer")) == "longer"
    assert memo.get("longer", lambda: make("again")) == "longer"


class Side:
    """A side of bench_elastic.py that notes its steps."""

    def __init__(self, name: str, did: list[tuple[str, bool, int]]) -> None:
        self.model = torch.nn.Dropout()
        self._name, self._did = name, did

    def step(self, step: int) -> float:
        self._did.append((self._name, self.model.training, step))
        return 1.0


def test_both_sides_do_the_same_steps_in_turns_and_the_first_turn_has_no_dropout() -> None:
    did: list[tuple[str, bool, int]] = []
    case = bench_elastic.Case("small", 1, 1, block=2)
    found = list(bench_elastic.blocks(case, 3, {side: Side(side, did) for side in bench_elastic.SIDES}))
    turns = [("elastic", False, 1), ("reference", False, 1), ("reference", True, 3), ("elastic", True, 3)]
    turns += [("elastic", True, 5), ("reference", True, 5)]
    assert did == [(side, drops, step) for side, drops, first in turns for step in (first, first + 1)]
    assert [block["side"] for block in found] == [side for side, _, _ in turns]
    assert all(len(block["seconds"]) == 2 for block in found)


@pytest.mark.slow
def test_a_step_of_the_library_is_measured_beside_one_of_torch(tmp_path: Path) -> None:
    told = tmp_path / "steps.json"
    little = ["--cases", "small-8", "small-1-alone", "--blocks", 3, "--block", 2, "--json", told]
    done = python("benchmarks/bench_elastic.py", *little, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(told.read_text())
    assert set(found) == {"small-8", "small-1-alone"}
    for case in found.values():
        assert case["state"] > 0
        for side in bench_elastic.SIDES:
            assert [len(block) for block in case[side]["seconds"]] == [2, 2, 2]
            assert all(seconds > 0 for block in case[side]["seconds"] for seconds in block)
    assert sum(line.startswith("| small-") for line in done.stdout.splitlines()) == 2


@pytest.mark.slow
def test_what_a_recovery_takes_with_a_large_state_is_measured(tmp_path: Path) -> None:
    told = tmp_path / "found.json"
    done = python(
        "benchmarks/bench_large_state.py", "--sizes", 1, "--cases", "all-reduce", "--json", told, cwd=REPOSITORY
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (found,) = json.loads(told.read_text())
    assert {"rendezvous", "reduce", "agree", "training", "peak", "kept"} < set(found)
    assert 0 < found["set aside"] < 4  # MiB of gradients
    assert sum(line.startswith("| all-reduce | 1 |") for line in done.stdout.splitlines()) == 2
