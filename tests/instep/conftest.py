"""The failure-free runs that others are compared with: each is made once a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.forkserver import ForkServer
from tests.instep.runs import Case, Result

Reference = Callable[[Case], Result]


@pytest.fixture(scope="session")
def reference(forkserver: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    """``reference(case)``: the result of the same run without its strikes."""
    made: dict[Case, Result] = {}

    def of(case: Case) -> Result:
        plain = case.failure_free
        if plain not in made:
            result = plain.run(forkserver, tmp_path_factory.mktemp(f"reference-{plain.layout.name}"))
            assert result.ended.ok, result.told()
            assert [len(step.microbatches) for step in result.steps] == [plain.layout.replicas] * plain.iterations
            assert {sum(map(len, step.microbatches.values())) for step in result.steps} == {plain.layout.samples}
            made[plain] = result
        return made[plain]

    return of
