"""What a training's own flags show to be wrong before anything is started, so within a second and on a login node.

Only what can be seen without importing torch or Megatron: names and values of ``--recover-*``; of Megatron's own
scripts sizes against the number of workers, and files that are not there. The script makes these checks and many more
when it has parsed its flags (``megatron_hooks/entry/flags.py``).
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path

from recover_megatron.arguments import FLAGS, RecoverConfig, config_from_argv, problems
from recover_megatron.chaos.spec import BadSpec, parse_spec
from recover_megatron.errors import UserError

SIZES = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size")
EXPERTS = ("--expert-model-parallel-size", "--expert-tensor-parallel-size")
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


def is_megatrons(script: str) -> bool:
    """Whether a script takes Megatron's flags: ours, or that of a patched checkout."""
    return Path(script).stem.startswith("pretrain_")


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
    return ["--recover-metrics needs the Python package prometheus-client: pip install 'recover-megatron[metrics]'"]


def _layout(script_args: Sequence[str], world: int) -> list[str]:
    given = given_flags(script_args, [*SIZES, *EXPERTS, "--yaml-cfg"])
    try:
        sizes = {name: int(given[name][-1]) for name in SIZES if name in given}
        expert, expert_tensor = (int(given[name][-1]) if name in given else 0 for name in EXPERTS)
    except (ValueError, IndexError):
        return []  # Megatron's parser says which is no number
    replica = math.prod(sizes.values())
    if "--yaml-cfg" in given or replica < 1 or expert < 0 or expert_tensor < 0:
        return []
    product = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    change = "start a multiple of that (recover-run --nproc-per-node, --nnodes) or change these sizes"
    if world % replica:
        return [f"{world} workers cannot hold whole replicas of {replica} ({product}): {change}"]
    tensor, pipeline = (sizes.get(name, 1) for name in SIZES[:2])
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
