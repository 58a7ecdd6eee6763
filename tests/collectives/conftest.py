"""Fixtures of the collectives' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.collectives.crew import Crew


@pytest.fixture(scope="session")
def crew() -> Iterator[Crew]:
    """Forks workers from a parent that imported torch once."""
    with Crew() as crew:
        yield crew
