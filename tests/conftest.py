"""Fixtures that several folders of tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.drawn import SEED
from tests.harness.forkserver import ForkServer
from tests.harness.xdist_groups import pytest_collection_modifyitems, pytest_xdist_auto_num_workers

__all__ = ["pytest_collection_modifyitems", "pytest_xdist_auto_num_workers"]  # hooks

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")  # no test asserts a time: how long an example takes says how busy the machine is


@pytest.fixture(scope="session")
def forkserver() -> Iterator[ForkServer]:
    """Megatron imported once for all runs of the session; see tests/harness/forkserver.py."""
    with ForkServer() as server:
        yield server


DRAWN = f"RECOVER_SEED={SEED} draws from the long families; RECOVER_MATRIX=all runs all of them"


def pytest_report_header() -> str:
    return DRAWN


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(DRAWN)
