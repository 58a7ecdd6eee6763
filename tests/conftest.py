"""Fixtures that several folders of tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.drawn import ALL
from tests.harness import ci_list
from tests.harness.forkserver import ForkServer
from tests.harness.xdist_groups import pytest_collection_modifyitems, pytest_xdist_auto_num_workers

__all__ = ["pytest_collection_modifyitems", "pytest_xdist_auto_num_workers"]  # hooks

# No test asserts a time: how long an example takes says how busy the machine is.  What CI tries is always the same.
# Fixtures of functions that examples share are the crew's: started once, of no example.
settings.register_profile(
    "ours",
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    **({} if ALL else {"derandomize": True, "database": None}),
)
settings.load_profile("ours")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(ci_list, "ci-list")


@pytest.fixture(scope="session")
def forkserver() -> Iterator[ForkServer]:
    """Megatron imported once for all runs of the session; see tests/harness/forkserver.py."""
    with ForkServer() as server:
        yield server
