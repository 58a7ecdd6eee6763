"""An operation over replicas inside a step is known, or ends the run with the place that made it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives
from torch.distributed import distributed_c10d as c10d

from recover_megatron.instep.faults import UnknownOperation
from recover_megatron.instep.grid import launch_grid
from recover_megatron.instep.process_group import EpochGroup, register_new
from recover_megatron.instep.traffic import Caller, Mode, Traffic
from recover_megatron.megatron_hooks.groups import is_known

REPLICAS = (0, 1, 2)


class Session:
    def __init__(self) -> None:
        self.said: list[tuple[int, str]] = []

    def give_up(self, code: int, reason: str) -> None:
        self.said.append((code, reason))


@pytest.fixture
def traffic() -> Traffic:
    """Of worker 1 in three replicas of one worker, inside a step; it knows of nothing."""
    grid = launch_grid(3, tensor=1, context=1, pipeline=1, inner_ranks=1)
    assignment = SimpleNamespace(started=False, grid=grid, replica=1)
    traffic = Traffic(1, Mode.STEP)
    traffic.recovery = SimpleNamespace(session=Session(), assignment=assignment)  # type: ignore[assignment]
    return traffic


@pytest.fixture
def group(traffic: Traffic) -> Iterator[EpochGroup]:
    world = c10d._world
    tables = (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config)
    made = EpochGroup(traffic, None, REPLICAS, "data_parallel")
    register_new(made, REPLICAS, "gloo")
    yield made
    for table in tables:
        table.pop(made, None)


def ones(many: int = 1) -> torch.Tensor:
    return torch.ones(many)


def lists() -> list[torch.Tensor]:
    return [ones() for _ in REPLICAS]


OPERATIONS: dict[str, Callable[[EpochGroup], Any]] = {
    "allreduce": lambda group: dist.all_reduce(ones(), group=group),
    "allreduce async": lambda group: dist.all_reduce(ones(), group=group, async_op=True),
    "broadcast": lambda group: dist.broadcast(ones(), 0, group=group),
    "reduce": lambda group: dist.reduce(ones(), 1, group=group),
    "allgather": lambda group: dist.all_gather(lists(), ones(), group=group),
    "_allgather_base": lambda group: dist.all_gather_into_tensor(ones(3), ones(), group=group),
    "gather": lambda group: dist.gather(ones(), lists(), 1, group=group),
    "scatter": lambda group: dist.scatter(ones(), lists(), 1, group=group),
    "_reduce_scatter_base": lambda group: dist.reduce_scatter_tensor(ones(), ones(3), group=group),
    "reduce_scatter": lambda group: dist.reduce_scatter(ones(), lists(), group=group),
    "alltoall": lambda group: dist.all_to_all(lists(), lists(), group=group),
    "alltoall_base": lambda group: dist.all_to_all_single(ones(3), ones(3), group=group),
    "barrier": lambda group: dist.barrier(group=group),
    "monitored_barrier": lambda group: group.monitored_barrier(),
    "send": lambda group: dist.send(ones(), 2, group=group),
    "recv": lambda group: dist.recv(ones(), 0, group=group),
    "allgather objects": lambda group: dist.all_gather_object([None] * 3, "mine", group=group),
    "broadcast objects": lambda group: dist.broadcast_object_list(["mine"], 0, group=group),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_is_not_known_ends_the_run_and_names_the_place(traffic: Traffic, group: EpochGroup, name: str) -> None:
    with pytest.raises(UnknownOperation) as raised:
        OPERATIONS[name](group)
    text = str(raised.value)
    assert f"{__file__}:" in text
    assert name.split()[0].strip("_").split("_base")[0] in text
    assert "data_parallel" in text
    (told,) = traffic.recovery.session.said  # type: ignore[union-attr]
    assert told == (1, text)


def test_functional_collectives_do_not_pass_by(group: EpochGroup) -> None:
    """They look a group up by its name, in a table of torch's that has its own group of all of the launch."""
    with pytest.raises(RuntimeError, match="group"):
        _functional_collectives.all_reduce(ones(), "sum", group=group)


def test_what_is_known_sends_nothing(traffic: Traffic, group: EpochGroup) -> None:
    traffic._known = lambda caller: caller.function.startswith("test_what_is_known")
    value = ones()
    dist.all_reduce(value, group=group)
    assert value.item() == 1


def test_the_functions_that_are_known_are_megatrons() -> None:
    """One of the same name elsewhere is not, nor is anything else that they do."""
    assert is_known(Caller("megatron.training.training", "train_step", "allreduce"))
    assert not is_known(Caller("megatron.training.training", "train_step", "broadcast"))
    assert not is_known(Caller("megatron.training.training", "training_log", "allreduce"))
    assert not is_known(Caller("__main__", "train_step", "allreduce"))
