"""An orphan offers the state after an update only if its device had carried that out before its groups were aborted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from recover_megatron.megatron_hooks.training_parts import StepGuard


class Event:
    """Of a device that is done when it is told so."""

    done = False

    def record(self) -> None:
        """Into a stream."""

    def query(self) -> bool:
        return self.done


def between_updates(guard: StepGuard, event: Event) -> None:
    guard.seal()


def after_one_that_is_done(guard: StepGuard, event: Event) -> None:
    guard.begin()
    guard.end()
    event.done = True
    guard.seal()


def while_one_is_queued(guard: StepGuard, event: Event) -> None:
    guard.begin()
    guard.end()
    guard.seal()
    event.done = True  # with garbage


def while_one_is_made(guard: StepGuard, event: Event) -> None:
    guard.begin()
    guard.seal()
    guard.end()
    event.done = True


def before_one(guard: StepGuard, event: Event) -> None:
    guard.seal()
    guard.begin()
    guard.end()
    event.done = True


@pytest.mark.parametrize(
    ("broken", "believed"),
    [
        (between_updates, True),
        (after_one_that_is_done, True),
        (while_one_is_queued, False),
        (while_one_is_made, False),
        (before_one, False),
    ],
)
def test_only_an_update_that_was_carried_out_before_the_abort_counts(
    broken: Callable[[StepGuard, Event], None], believed: bool
) -> None:
    event = Event()
    guard = StepGuard(lambda: event)
    broken(guard, event)
    assert guard.believed is believed
    guard.seal()
    assert guard.believed is believed, "the first abort counts"
    guard.reset()
    assert guard.believed


def test_on_the_cpu_an_update_counts_when_it_has_returned() -> None:
    guard = StepGuard.of(torch.device("cpu"))
    guard.begin()
    guard.end()
    guard.seal()
    assert guard.believed
