"""The exit code of a run that ended by itself."""

import signal

import pytest

from recover_megatron.launch.states import ExitOutcome, run_exit_code

KILLED = -signal.SIGKILL


def ends(*statuses: int) -> list[ExitOutcome]:
    """Workers that ended in this order, each with an exit code or minus a signal."""
    return [
        ExitOutcome(worker_id, None if status < 0 else status, -status if status < 0 else None, float(worker_id))
        for worker_id, status in enumerate(statuses)
    ]


@pytest.mark.parametrize(
    ("statuses", "plain", "fault_tolerant"),
    [
        ((), 0, 0),
        ((0, 0, 0), 0, 0),
        ((0, 3, 0), 3, 0),
        ((KILLED, 0, 0), 137, 0),
        ((3, 4, 4), 3, 4),
        ((3, 4), 3, 3),
        ((KILLED, 1, 1), 137, 1),
        ((KILLED, KILLED), 137, 137),
        ((KILLED, 10, 10), 10, 10),
        ((1, 12, 11), 12, 12),
        ((0, 11), 11, 11),
    ],
)
def test_exit_code_table(statuses, plain, fault_tolerant):
    assert run_exit_code(ends(*statuses), fault_tolerant=False) == plain
    assert run_exit_code(ends(*statuses), fault_tolerant=True) == fault_tolerant


def test_first_means_earliest_in_time_not_lowest_worker_id():
    outcomes = [ExitOutcome(0, 4, None, 2.0), ExitOutcome(1, 3, None, 1.0)]
    assert run_exit_code(outcomes, fault_tolerant=False) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code"),
    [((), 5), (("--recover",), 5), (("--recover", "--all-fail"), 6)],
)
def test_recover_run_exits_by_the_table(bench, arguments, code):
    script = bench.script(
        """
        import os, sys
        if "--all-fail" in sys.argv:
            sys.exit(6)
        sys.exit(5 if os.environ["RANK"] == "1" else 0)
        """
    )
    bench.run("--nproc-per-node", 3, script, *arguments, ends=code)


def test_workers_that_failed_alike_are_summed_up_once(bench):
    launch = bench.run("--nproc-per-node", 3, bench.script("import sys; sys.exit(7)"), ends=7)
    last = launch.err.strip().splitlines()[-1]
    assert "0 of 3 workers finished" in last
    assert "workers 0-2 failed with exit code 7" in last
    assert last.count("exit code 7") == 2  # the workers', together, and recover-run's own
