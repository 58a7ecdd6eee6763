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


def test_a_callback_that_raises_keeps_no_other_from_being_called() -> None:
    loop, told = EventLoop(), []

    def fails() -> None:
        raise ValueError("a fault")

    read, write = os.pipe()
    os.write(write, b"x")
    loop.watch(read, fails)
    loop.call_later(0, fails)
    loop.call_later(0, lambda: told.append("timer"))
    loop.call_from_thread(fails)
    loop.call_from_thread(lambda: told.append("call"))
    with pytest.raises(ValueError, match="a fault"):
        loop.run_once()
    assert sorted(told) == ["call", "timer"]
    loop.close()
    os.close(read)
    os.close(write)
