"""What a training's own flags show before anything is started, so within a second and on a login node.

``check``: what is wrong with them.  Only what can be seen without importing torch or Megatron: names and values of
``--recover-*``; of Megatron's own scripts sizes against the number of workers, and files that are not there.  The
script makes these checks and many more when it has parsed its flags (``megatron_hooks/entry/flags.py``).

``forecast``: what the loss of each node would cost the training, in lines for people: of ``recover-run --check``, and
at a start.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

from recover_megatron.arguments import FLAGS, RecoverConfig, config_from_argv, problems
from recover_megatron.chaos.spec import BadSpec, parse_spec
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
DATA = ("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path")
FILES = ("--data-args-path", "--per-split-data-args-path", "--vocab-file", "--merge-file")
ELSEWHERE = ("--yaml-cfg", "--dataloader-type", "--sft", "--perform-rl-step")
"""With one of these the data, or all flags, are found in another way."""


def check(script: str, script_args: Sequence[str], world: int) -> list[str]:
    """The reasons against the flags of a training of ``world`` workers, one line each with what to change."""
    megatrons = is_megatrons(script)
    if {"--help", "-h", "--version"} & set(script_args) or not (megatrons or "--recover" in script_args):
        return []
    found = [*_names(script_args), *_values(script_args, world)]
    return [*found, *_layout(script_args, world), *_data(script_args)] if megatrons else found


def _names(script_args: Sequence[str]) -> list[str]:
    known = [flag.name for flag in FLAGS]
    found = []
    for word in script_args:
        name = word.partition("=")[0]
        if name.startswith("--recover") and name not in known:
            near = difflib.get_close_matches(name, known, n=2, cutoff=0.5)
            found.append(f"unknown flag {name}" + (f": did you mean {' or '.join(near)}?" if near else ""))
    return found


def _values(script_args: Sequence[str], world: int) -> list[str]:
    try:
        config = config_from_argv(script_args)
    except UserError as error:
        return [str(error)]
    if config.enabled:
        return [*problems(config), *_faults(config, world), *_metrics(config)]
    if config.inject is not None:
        return ["--recover-inject needs --recover: without it nothing is injected, and no death is survived"]
    return []


def _faults(config: RecoverConfig, world: int) -> list[str]:
    """Of ``--recover-inject``; workers that come later have numbers of their own where a run may grow."""
    try:
        parse_spec(config.inject or "", workers=None if config.max_replicas else world)
    except BadSpec as error:
        return [f"--recover-inject: {reason}" for reason in error.reasons]
    return []


def _metrics(config: RecoverConfig) -> list[str]:
    if not (config.metrics or config.metrics_file) or importlib.util.find_spec("prometheus_client"):
        return []
    flag = "--recover-metrics" if config.metrics else "--recover-metrics-file"
    return [f"{flag} needs the Python package prometheus-client: pip install 'recover-megatron[metrics]'"]


def _layout(script_args: Sequence[str], world: int) -> list[str]:
    given = given_flags(script_args, [*SIZES.values(), EXPERT, EXPERT_TENSOR, "--yaml-cfg"])
    try:
        sizes = {name: int(given[name][-1]) for name in SIZES.values() if name in given}
        expert, expert_tensor = (int(given[name][-1]) if name in given else 0 for name in (EXPERT, EXPERT_TENSOR))
    except (ValueError, IndexError):
        return []  # Megatron's parser says which is no number
    replica = prod(sizes.values())
    if "--yaml-cfg" in given or replica < 1 or expert < 0 or expert_tensor < 0:
        return []
    product = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    change = "start a multiple of that (recover-run --nproc-per-node, --nnodes) or change these sizes"
    if world % replica:
        return [f"{world} workers cannot hold whole replicas of {replica} ({product}): {change}"]
    tensor, pipeline = (sizes.get(SIZES[size], 1) for size in ("tensor", "pipeline"))
    experts = max(1, expert) * (expert_tensor or tensor) * pipeline
    if expert > 1 and world % experts:
        return [f"{world} workers cannot hold whole sets of experts, of {experts} workers (EP {expert}): {change}"]
    wanted = config_from_argv(script_args).min_replicas if not _values(script_args, world) else 1
    if wanted > max(1, world // replica):
        return [
            f"--recover-min-replicas {wanted}: this run has {world // replica} at its launch ({world} workers, "
            f"{replica} to a replica): lower it, or start more workers"
        ]
    return []


def _data(script_args: Sequence[str]) -> list[str]:
    given = given_flags(script_args, [*DATA, *FILES, *ELSEWHERE, "--mock-data", "--micro-batch-size"])
    found = [
        f"{name} {path}: no such file"
        for name in FILES
        for path in given.get(name, [])[-1:]
        if _is_here(path) and not Path(path).is_file()
    ]
    if any(name in given for name in ELSEWHERE):
        return found
    if "--micro-batch-size" in given and not any(name in given for name in (*DATA[:2], *FILES[:2], "--mock-data")):
        return [
            *found,
            "no training data: give --data-path PREFIX (files PREFIX.bin and PREFIX.idx, made by "
            "scripts/prepare_corpus.py or Megatron's tools/preprocess_data.py), or --mock-data",
        ]
    for name in DATA:
        for prefix in given.get(name, []):
            missing = [prefix + suffix for suffix in (".bin", ".idx") if not Path(prefix + suffix).is_file()]
            if missing and _is_here(prefix) and not _is_weight(prefix):
                files = " and ".join(missing)
                found.append(f"{name} {prefix}: no {files} here (give the path without .bin or .idx)")
    return found


def given_flags(script_args: Sequence[str], names: Sequence[str]) -> dict[str, list[str]]:
    """The values of those flags that are there: of one that is repeated the last."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in names:
        parser.add_argument(name, nargs="*")
    try:
        values, _ = parser.parse_known_args(list(script_args))
    except argparse.ArgumentError:
        return {}
    told = {name: getattr(values, name[2:].replace("-", "_")) for name in names}
    return {name: value for name, value in told.items() if value is not None}


def _is_here(path: str) -> bool:
    """Whether a path is one of this host's file systems, as far as its name tells."""
    return "://" not in path


def _is_weight(word: str) -> bool:
    """Blends have weights between their prefixes."""
    try:
        float(word)
    except ValueError:
        return False
    return True


MAPPING, SPREAD = "--use-tp-pp-dp-mapping", "--use-distributed-optimizer"
FSDP, INSTANCES = "--use-megatron-fsdp", "--num-distributed-optimizer-instances"
OUTER = "--outer-dp-sharding-strategy"
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
        training = _training(script_args, nodes * per_node)
        if training is None:
            return None
        losses = node_losses(training, nodes * per_node, per_node)
        return Forecast(losses, _advice(training, losses, nodes * per_node, per_node))
    except (ValueError, IndexError, UserError):
        return None  # what the checks did not understand either; Megatron says what is wrong with it


def _training(script_args: Sequence[str], world: int) -> Training | None:
    names = [*SIZES.values(), EXPERT, EXPERT_TENSOR, MAPPING, SPREAD, FSDP, INSTANCES, OUTER, "--yaml-cfg"]
    found = given_flags(script_args, names)
    if "--yaml-cfg" in found:
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
