"""Iterations that are left out (--iterations-to-skip): their samples count as consumed, and nobody reads them.

A state's version counts them with the iteration before them, of which they change nothing: whoever begins anew begins
after them.  steps.jsonl has no line of them, and the line that follows says how many they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.training import get_args

from recover_megatron.integrate import Loop


def to_skip() -> frozenset[int]:
    """The iterations, from 1, that this run leaves out."""
    args = get_args()
    return frozenset(iteration for iteration in args.iterations_to_skip or () if iteration <= args.train_iters)


def after(iteration: int, skipped: Iterable[int]) -> int:
    """How many iterations are over when ``iteration`` of them are: with those that are left out right after them."""
    left_out = frozenset(skipped)
    while iteration + 1 in left_out:
        iteration += 1
    return iteration


def before(iteration: int, begun: int, skipped: Iterable[int]) -> int:
    """How many are left out right before ``iteration``, of a run that began after iteration ``begun``."""
    left_out = frozenset(skipped)
    found = 0
    while iteration - found - 1 > begun and iteration - found - 1 in left_out:
        found += 1
    return found


def install(loop: Loop) -> None:
    """Wrap the seam where Megatron reads the batch of an iteration that it leaves out.

    Microbatches are read by number (`data`): nobody asks for these.
    """
    loop.wrap("skipped_step", _unread)


def _unread(original: Callable[..., Any]) -> Callable[..., Any]:
    def dummy_train_step(data_iterator: Any) -> None:
        get_rerun_state_machine().current_iteration += 1  # by which Megatron names an iteration in its messages

    return dummy_train_step
