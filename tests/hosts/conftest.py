"""The hosts of a test; see hosts.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .hosts import Hosts, unavailable


@pytest.fixture(scope="session")
def can_have_hosts() -> None:
    """Skips, and says why, where there can be none."""
    if why := unavailable():
        pytest.skip(why)


@pytest.fixture
def three_hosts(can_have_hosts: None) -> Iterator[Hosts]:
    with Hosts(3) as hosts:
        yield hosts
