"""Fixtures that several folders of tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.drawn import SEED
from tests.forkserver import ForkServer


@pytest.fixture(scope="session")
def forkserver() -> Iterator[ForkServer]:
    """Megatron imported once for all runs of the session; see tests/forkserver.py."""
    with ForkServer() as server:
        yield server


DRAWN = f"RECOVER_SEED={SEED} draws from the long families; RECOVER_MATRIX=all runs all of them"


def pytest_report_header() -> str:
    return DRAWN


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(DRAWN)
