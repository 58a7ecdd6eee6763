"""Promises of the event loop to its callbacks, and events that end a round."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from recover_megatron.network import event_loop
from recover_megatron.network.event_loop import EventLoop


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    loop = EventLoop()
    yield loop
    loop.close()


@pytest.fixture
def pipes() -> Iterator[list[int]]:
    """The reading ends of two pipes that hold data."""
    ends = [os.pipe() for _ in range(2)]
    for _, write in ends:
        os.write(write, b"x")
    yield [read for read, _ in ends]
    for end in (end for both in ends for end in both):
        os.close(end)


def test_a_callback_that_raises_keeps_no_other_from_being_called(loop: EventLoop, pipes: list[int]) -> None:
    told = list[str]()

    def fails() -> None:
        raise ValueError("a fault")

    loop.add_reader(pipes[0], fails)
    loop.call_later(0, fails)
    loop.call_later(0, lambda: told.append("timer"))
    loop.call_from_thread(fails)
    loop.call_from_thread(lambda: told.append("call"))
    with pytest.raises(ValueError, match="a fault"):
        loop.run_once()
    assert sorted(told) == ["call", "timer"]
    loop.remove_reader(pipes[0])
    loop.run_once(0)  # the error is raised once


def test_what_has_arrived_is_told_before_a_timer_which_it_may_cancel(loop: EventLoop, pipes: list[int]) -> None:
    """Both are due in one round where the process was stopped: it must not take for missing what has come."""
    told = list[str]()
    loop.call_later(0, told.append, "timer")
    cancelled = loop.call_later(0, pytest.fail, "it was cancelled")
    loop.add_reader(pipes[0], lambda: [told.append("data"), cancelled.cancel()])
    loop.run_once()
    assert told == ["data", "timer"]


def test_what_is_removed_in_a_round_is_not_called_in_it(loop: EventLoop, pipes: list[int]) -> None:
    """Nor is what has taken its descriptor since, before that is known to be ready."""
    told = list[int]()

    def read(own: int, other: int) -> None:
        told.append(own)
        loop.remove_reader(other)
        loop.add_reader(other, told.append, -1)

    for own, other in (pipes, pipes[::-1]):
        loop.add_reader(own, read, own, other)
    loop.run_once()
    assert told in ([pipes[0]], [pipes[1]])


def test_a_thread_may_still_call_when_the_loop_is_closed(loop: EventLoop) -> None:
    loop.close()
    loop.call_from_thread(pytest.fail)


def test_a_round_ends_when_its_time_is_over(loop: EventLoop) -> None:
    loop.call_later(3600, pytest.fail)
    loop.run_once(0)


def test_no_module_calls_select_which_refuses_large_descriptors() -> None:
    """The reaper's only descriptor is 0. All others use ``is_ready``, a poll or a selector."""
    package = Path(event_loop.__file__).parents[1]
    assert [path.name for path in package.rglob("*.py") if "select.select([" in path.read_text()] == ["reaper.py"]
