"""The protocol's model holds in every reachable state, and its deliberate bugs are found."""

from __future__ import annotations

import pytest

from tests.drawn import some
from tests.formal import check as model

pytestmark = pytest.mark.slow

needs_spin = pytest.mark.skipif(
    bool(model.missing_tools()),
    reason=f"THE PROTOCOL'S MODEL IS NOT CHECKED: not installed: {', '.join(model.missing_tools())}",
)


def cases(configurations: tuple) -> list:
    return [pytest.param(configuration, id=configuration.what) for configuration in configurations]


@needs_spin
@pytest.mark.parametrize("configuration", some("configurations", cases(model.CONFIGURATIONS), 3))
def test_the_protocol_holds_in_every_reachable_state(configuration: object) -> None:
    result = model.check(configuration)
    assert result.complete
    assert result.errors == 0


@needs_spin
@pytest.mark.parametrize("mutant", some("mutants", cases(model.MUTANTS), 3))
def test_a_deliberate_bug_in_the_protocol_is_found(mutant: object) -> None:
    assert model.check(mutant).errors > 0
