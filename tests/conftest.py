"""Fixtures that several folders of tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.drawn import SEED
from tests.harness.forkserver import ForkServer

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")  # no test asserts a time: how long an example takes says how busy the machine is


@pytest.fixture(scope="session")
def forkserver() -> Iterator[ForkServer]:
    """Megatron imported once for all runs of the session; see tests/harness/forkserver.py."""
    with ForkServer() as server:
        yield server


@pytest.hookimpl(tryfirst=True)  # before xdist looks at the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have one process of a run (pytest -n) make all runs of the fork server, one after the other.

    So no two of them, with six or eight workers each, starve each other, and Megatron is imported for them once; what
    waits most of the time is done by the others meanwhile.
    """
    for item in items:
        uses = getattr(item, "fixturenames", ())
        if "forkserver" in uses and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group("fork server"))


DRAWN = f"RECOVER_SEED={SEED} draws from the long families; RECOVER_MATRIX=all runs all of them"


def pytest_report_header() -> str:
    return DRAWN


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(DRAWN)
