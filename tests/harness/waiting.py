"""Wait, or watch, for what gives no event: facts of files, of the process table, of another thread."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.harness.patience import patient

DEADLINE = patient(120)
"""Seconds; generous, for a loaded machine.  Every wait ends with what it is for."""


def eventually(
    condition: Callable[[], object],
    what: str = "what was waited for",
    seconds: float = DEADLINE,
    *,
    every: float = 0.02,
) -> None:
    """Return when ``condition`` holds; the test fails with ``what`` when it does not within ``seconds``.

    ``every``: seconds from one look to the next.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {seconds:g} s: {what}")
        time.sleep(every)


@contextlib.contextmanager
def meanwhile(look: Callable[[], object]) -> Iterator[None]:
    """While the block runs a thread calls ``look`` again and again, until it is true."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.02) and not look():
            pass

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def written_lines(path: Path) -> list[str]:
    """The lines of a file that somebody writes meanwhile, but one that is not complete; none if there is no file."""
    text = path.read_text() if path.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()
