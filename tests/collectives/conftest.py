"""Fixtures of the collectives' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.collectives.crew import Crew

settings.register_profile(
    "collectives", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
settings.load_profile("collectives")


@pytest.fixture(scope="session")
def crew() -> Iterator[Crew]:
    """Forks workers from a parent that imported torch once."""
    with Crew() as crew:
        yield crew
