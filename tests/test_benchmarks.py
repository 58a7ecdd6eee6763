"""Benchmarks that no other test runs still run, on very little; what they find is no matter of tests."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from benchmarks import bench_elastic, bench_host_cost
from recover_megatron.collectives.group import Memo
from tests.harness import REPOSITORY
from tests.harness.processes import python


@pytest.mark.slow
def test_a_recovery_of_plain_processes_is_measured_phase_by_phase() -> None:
    done = python("benchmarks/bench_recovery.py", "--workers", 3, "--kills", 1, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr[-2000:]
    row = next(line for line in done.stdout.splitlines() if line.startswith("| 3 |"))
    *phases, total = (float(cell) for cell in re.findall(r"([0-9.]+) \(", row))
    assert len(phases) == 6
    assert total == pytest.approx(sum(phases), abs=0.5)
    assert total > 0


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
