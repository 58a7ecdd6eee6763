"""Exceptions that end workers: what their last words tell of the next one, over the simulated network."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from script import play, table

from recover_megatron.membership.ending import ExceptionReport, alike, true_cause
from recover_megatron.membership.records import cut_middle
from recover_megatron.membership.wire import MAX_TRACEBACK

ERROR = "RuntimeError: the loss is not a number"


@table("""
the last worker that said why is named when nobody is left
    world 2 nodes=2 runs=4; kill 1; run 3; raises 0 at=5 own=1 RuntimeError: uncorrectable ECC error
    -> ends 10 no live worker is left
    ends 10 worker 0 on node0 was the last to say why: RuntimeError: uncorrectable ECC error
the second replica that ends in the same way ends the run with the true cause
    world 4 nodes=4 runs=4; raises 3 at=5 group=1 NaN -> stops; raises 0 at=5 group=0 NaN
    stops 1 microbatch 5 of iteration 7 raises NaN wherever it is run: on worker 3 on node3, then on worker 0 on node0
    exceptions 3:node3:7:5:NaN 0:node0:7:5:NaN; out 1 0 1 2
a fault that shows after the pass is known by what both replicas have tried
    world 4 nodes=4 runs=4; raises 3 at=9 group=3 tried=1,5,9 NaN
    raises 0 at=10 group=0 tried=2,6,10 NaN -> stops
    raises 1 at=11 group=1 tried=3,5,7,9,11 NaN
    ends 1 one of the microbatches 5, 9 of iteration 7 raises NaN wherever it is run
    ends 1 run: on worker 3 on node3, then on worker 1 on node1
the third replica that the same microbatch ends ends the run whatever the errors say
    world 4 nodes=4 runs=4; raises 3 at=9 group=3 tried=1,5,9 KeyError: a
    raises 0 at=5 group=0 tried=2,5 ValueError: b -> stops; raises 1 at=7 group=1 tried=3,5,7 KeyError: c
    -> ends 1 microbatch 5 of iteration 7 ends every worker that runs it
    ends 1 KeyError: a; ends 1 ValueError: b; ends 1 KeyError: c
three replicas with no microbatch in common are three faults
    world 4 nodes=4 runs=4; raises 3 at=9 group=3 tried=1,5,9 KeyError: a; raises 0 at=5 group=0 tried=2,5 ValueError: b
    raises 1 at=9 group=1 tried=3,9 KeyError: c -> stops
faults of hosts and devices say nothing about the work
    world 4 nodes=4 runs=4; raises 3 at=5 group=3 own=1 OSError: Too many; raises 0 at=5 group=0 own=1 OSError: Too many
    raises 1 at=5 group=1 own=1 OSError: Too many -> stops
a fault outside of microbatches is that of its phase
    world 4 nodes=4 runs=4; raises 3 group=3 phase=eval NaN; raises 0 group=0 phase=checkpoint NaN -> stops
    raises 1 group=1 phase=checkpoint NaN
    stops 1 iteration 7 (checkpoint) raises NaN wherever it is run: on worker 0 on node0, then on worker 1 on node1
""")
def test_exceptions(script: str) -> None:
    play(script)


@pytest.mark.parametrize(
    "other", ["at=5 group=1 NaN", "at=6 NaN", "NaN", "at=5 iteration=8 NaN", "at=5 RuntimeError: something else"]
)
def test_the_same_replica_or_another_fault_ends_nobody_else(other: str) -> None:
    play(f"world 4 nodes=4 runs=4; raises 3 at=5 group=1 NaN; raises 2 {other} -> stops; goes_on 3")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            "Rank 3, device 1: result nan (found NaN in bucket #3)",
            "Rank 12, device 0: result inf (found Inf in bucket #0)",
        ),
        ("no file /scratch/job_17/tmpabcdefgh/x", "no file /scratch/job_9/tmpzyxwvuts/x"),
        ("values 0.125 and 1e-05 at 0x7f3a", "values -3 and 2.5 at 0xbeef"),
        ("shape [1, 2, 3] of node12a", "shape [4] of node7b"),
        ("request 3f2a9c-71b0e4 failed", "request 9911aa-0a failed"),
    ],
)
def test_errors_are_alike_but_for_numbers_and_names_with_numbers(one: str, other: str) -> None:
    assert alike(one) == alike(other)
    assert alike(one) != alike(f"not {other}")


@given(st.text("#0123 .,:[]-naif", max_size=2000))
def test_no_error_takes_long_to_compare(error: str) -> None:
    assert len(alike(error)) <= len(error)


def test_last_words_said_while_no_coordinator_is_reached_are_told_to_the_next_one_once() -> None:
    play("world 3 nodes=3 runs=4; crash 0; raises 2 at=5 NaN -> exceptions 2:node2:7:5:NaN; led 0 1")


def test_a_fault_without_a_microbatch_is_told_by_its_iteration() -> None:
    first, second = (ExceptionReport(f"worker {n} on a", n, 7, None, ERROR) for n in (0, 1))
    assert true_cause(second, [first]) == (
        f"iteration 7 raises {ERROR} wherever it is run: on worker 0 on a, then on worker 1 on a"
    )


@given(st.text(max_size=400), st.integers(80, 300))
def test_a_long_text_keeps_its_beginning_and_its_end(text: str, limit: int) -> None:
    short = cut_middle(text, limit)
    if len(text) <= limit:
        assert short == text
    else:
        assert len(short) == limit
        assert text.startswith(short[:10])
        assert text.endswith(short[-10:])


def test_the_reason_of_a_stop_is_bounded_however_long_the_words() -> None:
    name = f"worker 1 on {'h' * 256}"
    first, second = (ExceptionReport(name, n, 1 << 53, 1 << 53, "x" * MAX_TRACEBACK) for n in (0, 1))
    cause = true_cause(second, [first])
    assert cause is not None
    assert len(cause) <= 2000
    assert cause.endswith(f"then on {name}")
