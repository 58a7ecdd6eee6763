"""The failure-free runs that others are compared with: each is made once, for all processes of a pytest run."""

from __future__ import annotations

import fcntl
import hashlib
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy
import pytest
import torch

from tests.harness.forkserver import ForkServer, Run
from tests.instep.runs import Case, Result, check, check_rows

Reference = Callable[[Case], Result]
Check = Callable[[Result, Result, float], None]


@pytest.fixture(scope="session")
def reference(forkserver: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """``reference(case)``: the result of the same run without its strikes."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent  # the folder of all processes
    known: dict[Case, Result] = {}

    def of(case: Case) -> Result:
        plain = case.failure_free
        if plain not in known:
            known[plain] = once(plain, forkserver, shared)
        return known[plain]

    return of


def once(plain: Case, forkserver: ForkServer, shared: Path) -> Result:
    """The result of a failure-free run: of the one in ``shared``, or of one that is made there now."""
    out = shared / f"reference-{plain.layout.name}-{hashlib.sha256(repr(plain).encode()).hexdigest()[:16]}"
    finished = out / "finished"
    with out.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if finished.exists():
            world = plain.layout.grid.world
            return Result(plain, Run([0] * world, [out / f"worker-{rank}.log" for rank in range(world)]), out)
        shutil.rmtree(out, ignore_errors=True)  # one that failed
        result = plain.run(forkserver, out)
        assert result.ended.ok, result.told()
        assert [len(step.microbatches) for step in result.steps] == [plain.layout.replicas] * plain.iterations
        for step in result.steps:
            samples = plain.layout.consumed(step.iteration) - plain.layout.consumed(step.iteration - 1)
            assert sum(map(len, step.microbatches.values())) == samples, step
        finished.touch()
        return result


@dataclass(frozen=True)
class Runs:
    """A test's own run, in the test's folder, and the failure-free one."""

    forkserver: ForkServer
    reference: Reference
    out: Path

    def __call__(self, case: Case, folder: str = "") -> Result:
        return case.run(self.forkserver, self.out / folder)

    def stock(self, case: Case, *flags: str, script: str = "") -> Result:
        """Megatron alone: the case without --recover; ``script``: in place of the case's."""
        argv, out = case.argv(self.out), self.out / "stock"
        argv = [script or argv[0], *argv[1 : argv.index("--recover")], *flags]
        world = case.layout.grid.world
        ended = self.forkserver.run(world, argv, out, losses=out / "losses.jsonl", training=out / "training")
        assert ended.ok, ended.tail()
        return Result(case, ended, out)

    def check_stock(self, case: Case, near: float = 1.0, script: str = "") -> None:
        """Assert that the failure-free run is what Megatron alone trains."""
        check_rows(self.reference(case).steps, self.stock(case, script=script).recorded, near, str(case))

    def check(self, case: Case, near: float = 1.0, by: Check = check, replicas: int | None = None) -> Result:
        """Run it, and assert ``by`` that it is the failure-free one but for rounding, with so many replicas at the
        end."""
        result = self(case)
        by(result, self.reference(case), near)
        assert replicas in (None, result.replicas[-1]), result.replicas
        return result


@pytest.fixture
def runs(forkserver: ForkServer, reference: Reference, tmp_path: Path) -> Runs:
    return Runs(forkserver, reference, tmp_path)


FEW = {"-few": 15, "-fewer": 8}
"""Validation sets: what is added to the prefix -> documents."""


@pytest.fixture(scope="session")
def indexed_data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The prefix of a small indexed data set of documents of different lengths, each with an end mark.

    Beside it are those of ``FEW``.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix = tmp_path_factory.mktemp("indexed") / "text"
    source = random.Random(0)
    for more, documents in (("", 400), *FEW.items()):
        builder = IndexedDatasetBuilder(f"{prefix}{more}.bin", dtype=numpy.int32)
        for _ in range(documents):
            tokens = [source.randrange(126) for _ in range(source.randrange(3, 40))]
            builder.add_document(torch.tensor([*tokens, 126], dtype=torch.int32), [len(tokens) + 1])
        builder.finalize(f"{prefix}{more}.idx")
    return str(prefix)
