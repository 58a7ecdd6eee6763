"""Wait for what gives no event: facts of files, of the process table, of another thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.patience import patient

DEADLINE = patient(120.0)
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


def written_lines(path: Path) -> list[str]:
    """The lines of a file that somebody writes meanwhile, but one that is not complete; none if there is no file."""
    text = path.read_text() if path.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()
