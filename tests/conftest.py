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


def pytest_report_collectionfinish() -> str:
    return f"RECOVER_SEED={SEED} draws from the long families; RECOVER_MATRIX=all runs all of them"
