"""What is left of a state that is spread over workers: all holders of a part have the same bits."""

from __future__ import annotations

from tests.instep.runs import Result, check


def check_sharded(result: Result, reference: Result, near: float = 1.0) -> None:
    """``check``, and that all who hold a part of the state at the end hold the same bits."""
    check(result, reference, near)
    flags = result.case.layout.flags
    instances = "instances" in flags and "fsdp" not in flags  # units are shards then, else workers
    told: dict[tuple[int, int, int], set[int]] = {}
    for worker, left in result.left.items():
        place = next(workers.index(worker) for workers in result.grid.values() if worker in workers)
        for (optimizer, unit), digest in left["units"].items():
            told.setdefault((optimizer, unit, place if instances else -1), set()).add(digest)
    units = {unit for _, unit, _ in told}
    if result.steps[-2].epoch == max(result.plans):  # else somebody's last place had nothing to hold yet
        assert units == {0, 1} if instances else units >= set(result.left), (str(result.case), told)
    assert all(len(digests) == 1 for digests in told.values()), (str(result.case), told)
