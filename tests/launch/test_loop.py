"""The launcher's event loop, when it gives signals back."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from recover_megatron.launch.loop import EventLoop

NUMBER = signal.SIGUSR1


@pytest.fixture
def before() -> Iterator[list[int]]:
    """Signals that came to the handler of before."""
    came: list[int] = []
    handler = signal.signal(NUMBER, lambda number, _frame: came.append(number))
    yield came
    signal.signal(NUMBER, handler)


def test_a_signal_that_nobody_has_looked_at_is_told_when_they_are_given_back(before: list[int]) -> None:
    told: list[int] = []
    loop = EventLoop()
    loop.handle_signals([NUMBER], told.append)
    os.kill(os.getpid(), NUMBER)
    loop.give_back_signals()
    assert (told, before) == ([NUMBER], [])
    os.kill(os.getpid(), NUMBER)
    loop.close()
    assert (told, before) == ([NUMBER], [NUMBER])


def test_where_none_has_come_nothing_is_told(before: list[int]) -> None:
    told: list[int] = []
    loop = EventLoop()
    loop.handle_signals([NUMBER], told.append)
    loop.close()
    assert (told, before) == ([], [])
