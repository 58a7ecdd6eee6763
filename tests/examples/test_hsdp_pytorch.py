"""The FSDP2 loop of examples/ trains as one process does that holds the whole model, whoever is killed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from examples import hsdp_pytorch as example
from tests.drawn import some
from tests.examples.launching import Losses, finish, losses, start

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("hsdp pytorch")]

ITERATIONS = 9


@pytest.fixture(scope="module")
def alone() -> tuple[Losses, list[torch.Tensor]]:
    """The losses and the last parameters of one process without FSDP, without any group."""
    torch.manual_seed(1)
    blocks = [example.Block() for _ in range(example.BLOCKS)]
    model = torch.nn.Sequential(*blocks, torch.nn.Linear(example.WIDTH, 1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    target = torch.randn(example.WIDTH, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    losses = {}
    for iteration in range(1, ITERATIONS + 1):
        optimizer.zero_grad()
        total = 0.0
        for j in range(example.M):
            samples = torch.Generator().manual_seed(1000 * iteration + j)
            x = torch.randn(8, example.WIDTH, dtype=torch.float64, generator=samples)
            loss = (model(x) - x @ target).square().mean() / example.M
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses[iteration] = total
    assert losses[ITERATIONS] < losses[1]
    return losses, [parameter.detach() for parameter in model.parameters()]


def run(out: Path, workers: int, shards: int, strikes: str, code: int = 0) -> str:
    """What recover-run said, which ends with ``code``."""
    script = "tests/examples/struck_hsdp.py"
    return finish(start(out, script, strikes, out, shards, ITERATIONS, workers=workers, options=()), code)


DEATHS = [
    # workers, shards, who strikes itself when: down to one shard group, in most
    pytest.param(8, 2, "1@2:forward,4@4:backward,3@6:reduce", id="one after the other"),
    pytest.param(8, 2, "0@2:agree,2@4:backward,5@4:rerun", id="one in the recovery of the other"),
    pytest.param(6, 2, "0@3:reduce,3@3:reduce", id="two at once"),
    pytest.param(6, 2, "1@3:reduced,2@5:step", id="between the sum and the step"),
    pytest.param(6, 3, "1@3:backward", id="of three"),
]


@pytest.mark.parametrize(("workers", "shards", "strikes"), some("hsdp", DEATHS, 1))
def test_whole_shard_groups_train_as_if_nobody_had_died(
    tmp_path: Path, alone: tuple[Losses, list[torch.Tensor]], workers: int, shards: int, strikes: str
) -> None:
    said = run(tmp_path, workers, shards, strikes)
    victims = [int(strike.split("@")[0]) for strike in strikes.split(",")]
    assert said.count("was killed by SIGKILL") == len(victims), said
    broken = {victim // shards for victim in victims}
    wanted, parameters = alone
    for worker in range(workers):
        group, shard = divmod(worker, shards)
        if group in broken:
            assert len(losses(tmp_path, worker)) < ITERATIONS
            continue
        assert losses(tmp_path, worker) == pytest.approx(wanted, rel=1e-9)
        for mine, whole in zip(torch.load(tmp_path / f"shard-{worker}.pt"), parameters, strict=True):
            parts = whole.chunk(shards)
            part = parts[shard] if shard < len(parts) else whole[:0]  # FSDP2 shards rows: some workers have none
            torch.testing.assert_close(mine, part, rtol=1e-8, atol=1e-10)


def test_without_a_whole_shard_group_the_run_ends_with_the_code_that_says_so(
    tmp_path: Path, alone: tuple[Losses, list[torch.Tensor]]
) -> None:
    run(tmp_path, 4, 2, "0@2:backward,3@4:forward", code=10)
    assert losses(tmp_path, 2) == pytest.approx({i: alone[0][i] for i in (1, 2, 3)}, rel=1e-9)
