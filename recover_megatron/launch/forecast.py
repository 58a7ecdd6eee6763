"""What a training takes of each node, and what the loss of a node would cost it, by its flags alone.

For ``recover-run --check``, and at a start.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from typing import Any

from recover_megatron.arguments import config_from_argv
from recover_megatron.errors import UserError
from recover_megatron.launch.messages import count
from recover_megatron.launch.plan import is_megatrons
from recover_megatron.workload.domains import NodeLoss, Training, data_parallel_ranks_per_replica, node_losses

SIZES = {
    "tensor": "--tensor-model-parallel-size",
    "pipeline": "--pipeline-model-parallel-size",
    "context": "--context-parallel-size",
}
EXPERT, EXPERT_TENSOR = "--expert-model-parallel-size", "--expert-tensor-parallel-size"
MAPPING, SPREAD = "--use-tp-pp-dp-mapping", "--use-distributed-optimizer"
FSDP, INSTANCES = "--use-megatron-fsdp", "--num-distributed-optimizer-instances"
OUTER = "--outer-dp-sharding-strategy"
SIZES_ELSEWHERE = ("--yaml-cfg", "--use-mp-args-from-checkpoint-args")
"""With one of these the sizes of a replica are in a file."""
SHADOWS = "--recover-shadow-shards 2"


@dataclass(frozen=True)
class Forecast:
    """``losses``: by node.  ``advice``: what would change a loss of state; empty: nothing is lost with one node."""

    losses: list[NodeLoss]
    advice: str

    def table(self) -> list[str]:
        """A line for nodes in a row of which the same is to be said, and the advice."""
        rows = [f"{_nodes([loss.node for loss in its])}: {said}" for said, its in groupby(self.losses, _said)]
        return [*rows, self.advice] if self.advice else rows

    def warning(self) -> str:
        """For the start of a run; empty: no loss of one node ends it."""
        fatal = [loss for loss in self.losses if loss.lost and not loss.back]
        if not fatal:
            return ""
        unless = " unless workers come in their place" if all(loss.waits for loss in fatal) else ""
        lost = f"the loss of {_nodes([loss.node for loss in fatal])} would end this run{unless}: {fatal[0].lost}"
        return f"{lost}. {self.advice}"


def forecast(script: str, script_args: Sequence[str], nodes: int, per_node: int) -> Forecast | None:
    """None where there is one node alone, or the training is none that survives, or none of Megatron's.

    ``script_args``: checked (``preflight.check``).  The nodes' ranks are taken to lie in their order.
    """
    if nodes < 2 or "--recover" not in script_args or not is_megatrons(script):
        return None
    try:
        training = training_of(script_args, nodes * per_node)
        if training is None:
            return None
        losses = node_losses(training, nodes * per_node, per_node)
        return Forecast(losses, _advice(training, losses, nodes * per_node, per_node))
    except (ValueError, IndexError, UserError):
        return None  # what the checks did not understand either; Megatron says what is wrong with it


def training_of(script_args: Sequence[str], world: int) -> Training | None:
    """What flags say of the shape of a training of ``world`` workers; None: it is told elsewhere.

    Raises ValueError and IndexError for what is no number, UserError for a wrong value of ``--recover-*``.
    """
    names = [*SIZES.values(), EXPERT, EXPERT_TENSOR, MAPPING, SPREAD, FSDP, INSTANCES, OUTER, *SIZES_ELSEWHERE]
    found = given_flags(script_args, names)
    if any(name in found for name in SIZES_ELSEWHERE):
        return None

    def number(name: str, default: int) -> int:
        return int(found[name][-1]) if name in found else default

    sizes = {size: number(name, 1) for size, name in SIZES.items()}
    expert, fsdp = number(EXPERT, 1), FSDP in found
    instances = number(INSTANCES, 1)
    if fsdp:
        instances = max(instances, 2)  # --recover makes two of one (``megatron_hooks.refused``)
    expert_tensor = number(EXPERT_TENSOR, sizes["tensor"])
    inner_ranks = data_parallel_ranks_per_replica(
        tensor=sizes["tensor"], context=sizes["context"], expert=expert, expert_tensor=expert_tensor
    )
    spread = found.get(OUTER, ["no_shard"])[-1] == "optim" if fsdp else SPREAD in found
    config = config_from_argv(script_args)
    return Training(
        **sizes,
        inner_ranks=max(1, world // prod(sizes.values()) // instances) if fsdp else inner_ranks,
        pipeline_before_data=MAPPING in found,
        experts=expert > 1,
        spread=spread,
        shard_groups=fsdp,
        shadows=config.shadow_shards,
        instances=1 if fsdp else instances,
        memory=config.memory_tier != "off",
        blocks=sizes["pipeline"] == 1 or expert * expert_tensor == sizes["tensor"] * sizes["context"],
    )


@dataclass(frozen=True)
class Needs:
    """What a training takes of a node: as much as is enough, and what it cannot do without (0: not known).

    ``files``: open ones of one worker, connections included.  ``tasks``: processes and threads of the whole node.
    ``shared``: bytes of /dev/shm, for the batches of loader processes.
    """

    files: int
    least_files: int
    tasks: int
    least_tasks: int
    shared: int


def needs_of(script_args: Sequence[str], world: int, here: int, environ: Mapping[str, str], *, cpu: bool) -> Needs:
    """Of a training of Megatron's with ``--recover``: ``here`` of ``world`` workers are on the node.

    Counted on CPUs, where every group is gloo's (tests/launch/test_limits.py): 56 threads, and 118 descriptors and up
    to 11 for each other worker.  Of its sockets a worker makes duplicates when it looks for gloo's.  A loader process
    takes pipes, and a descriptor for each tensor of a batch.  ``cpu``: False: on GPUs, where nothing was counted, so
    that no limit is known to be too low.
    Raises ValueError or IndexError for a flag that is no number.
    """
    names = ("--num-workers", SIZES["tensor"], "--micro-batch-size", "--seq-length")
    found = given_flags(script_args, [*names, "--no-create-attention-mask-in-dataloader"])
    loaders, tensor, micro, sequence = (
        int(found[name][-1]) if name in found else default for name, default in zip(names, (2, 1, 1, 1), strict=True)
    )
    omp = environ.get("OMP_NUM_THREADS", "").split(",")[0]
    pool = int(omp) if omp.isdecimal() else 1 if here > 1 else len(os.sched_getaffinity(0))
    # Tokens, labels and positions in 8 bytes each, weights in 4; each loader has two batches ahead, and makes one more.
    mask = 0 if "--no-create-attention-mask-in-dataloader" in found else sequence
    batch = micro * sequence * (28 + mask)
    return Needs(
        files=175 + 24 * (world - 1) + 30 * loaders,
        least_files=(100 + 4 * (world - 1)) * cpu,
        tasks=30 + here * (64 + 12 * loaders + 2 * (pool - 1)),
        least_tasks=40 * here * cpu,
        shared=3 * loaders * batch * -(-here // max(1, tensor)),
    )


def given_flags(script_args: Sequence[str], names: Sequence[str]) -> dict[str, list[str]]:
    """The values of those flags that are there: of one that is repeated the last."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in dict.fromkeys(names):
        parser.add_argument(name, nargs="*")
    try:
        values, _ = parser.parse_known_args(list(script_args))
    except argparse.ArgumentError:
        return {}
    told = {name: getattr(values, name[2:].replace("-", "_")) for name in names}
    return {name: value for name, value in told.items() if value is not None}


def _advice(training: Training, losses: Sequence[NodeLoss], world: int, per_node: int) -> str:
    """The first change by which no loss of a node ends the run; tried, not guessed."""
    if not any(loss.lost for loss in losses):
        return ""
    changes: list[tuple[str, dict[str, Any]]] = []
    if training.blocks and not training.pipeline_before_data:
        changes.append((MAPPING, {"pipeline_before_data": True}))
    if training.spread and training.instances == 1 and training.shadows < 2:
        more = {"shadows": 2}
        changes += [(SHADOWS, more), *((f"{flag} and {SHADOWS}", {**change, **more}) for flag, change in changes)]
    for flag, change in changes:
        if not any(loss.lost for loss in node_losses(replace(training, **change), world, per_node)):
            return f"With {flag} no loss of one node does that."
    if any(loss.waits for loss in losses):
        return (
            "No flag changes that. With workers in place of the lost ones (--recover-spares, on another node; "
            "recover-run --join, with --max-restarts) all go back to snapshots in memory; without, the run "
            "ends, and the newest checkpoint (--save) is all there is."
        )
    if all(loss.back for loss in losses if loss.lost):
        return "No flag changes that."
    return "No flag changes that: save checkpoints (--save), for after such a loss the newest is all there is."


def _said(loss: NodeLoss) -> str:
    if loss.back:
        end = f"{loss.whole} go back to snapshots in memory: {loss.lost}"
    elif loss.waits:
        end = f"the run ends unless workers come in their place: {loss.lost}"
    else:
        end = f"the run ends: {loss.lost}" if loss.lost else f"{loss.whole} go on"
    return f"{count(loss.workers)} lost, {count(loss.broken, 'replica', 'replicas')} broken, {end}"


def _nodes(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"node {numbers[0]}"
    if list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"one of nodes {numbers[0]} to {numbers[-1]}"
    return "one of nodes " + ", ".join(map(str, numbers))
