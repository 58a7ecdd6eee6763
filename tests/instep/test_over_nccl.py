"""Whole runs of Megatron whose gradients travel over NCCL's double: the real transport, two deaths, regroup, rejoin."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.drawn import some
from tests.instep.conftest import Runs
from tests.instep.runs import NO_EVALUATION, Case, Layout, Strike

pytestmark = pytest.mark.slow

TP2_DP2 = Layout("tp2-dp2", 2, tensor=2)
NCCLS = {
    "2.29, errors at once": {"version": [2, 29, 7], "errors": 0},
    "2.29, errors never": {"version": [2, 29, 7], "errors": 2},
    "2.27, errors late": {"version": [2, 27, 7], "errors": 1},
}
CASES = [(collective, nccl) for collective in ("native", "ring") for nccl in NCCLS]


@pytest.mark.parametrize(("collective", "nccl"), some("over NCCL", CASES, 1))
def test_two_deaths_and_two_newcomers_leave_the_training_equal(runs: Runs, collective: str, nccl: str) -> None:
    """Of each replica one worker dies; what is left makes a whole one, and newcomers the second one."""
    case = Case(TP2_DP2, (Strike(0, 1, 3, "backward"), Strike(1, 0, 8, "forward")), 30, restarts=2)
    case = replace(case.over_nccl(collective, **NCCLS[nccl], seed=1), model=(*NO_EVALUATION, "--clip-grad", "0.2"))
    result = runs.check(case)
    assert result.replicas[0] == result.replicas[-1] == 2, result.replicas
    calls = [line for log in result.ended.logs for line in log.read_text().splitlines() if "NCCL's double:" in line]
    assert sum(line.endswith("init") for line in calls) >= 4, "every worker of the launch has made one"
