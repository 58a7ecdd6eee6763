"""Training script of a launch: its arguments, parsed once, and what the launcher knows of the training from them.

Megatron and torch are not imported.  The script parses its arguments again and refuses what the launcher cannot judge.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path

from recover_megatron import script_flags
from recover_megatron.arguments import RecoverConfig, config_from_argv, problems
from recover_megatron.errors import UserError
from recover_megatron.launch.command_line.readers import LOAD, PRETRAIN, imports
from recover_megatron.workload.domains import Training, data_parallel_ranks_per_replica

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
"""Flags that make Megatron read the sizes of a replica from a file instead of the command line."""
FOLDERS, FORMAT, LAST_RESORT = ("--save", "--load"), "--ckpt-format", "--recover-last-resort"
NO_SAVE = "no --save"
TRAINING = "pretrain_gpt_recover"
"""Name, without .py, of the training script that ships with this package; also the name of its module."""


@dataclass(frozen=True)
class Script:
    """Script of a launch and its arguments; ``read`` makes a Script from the words of a command line."""

    target: str = ""
    """Script or module, as it was given; empty only if the command line is refused."""
    args: tuple[str, ...] = ()
    recover: RecoverConfig = field(default_factory=RecoverConfig)
    """Values of the ``--recover-*`` flags; if one of them cannot be parsed, the defaults of all."""
    readable: bool = True
    """False if a value of a ``--recover-*`` flag cannot be parsed: the checks and the script itself refuse it."""
    given: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Flag -> the words after it, of all flags that are given; of a repeated flag, the last use."""

    @classmethod
    def read(cls, target: str, args: Sequence[str], environ: Mapping[str, str] = os.environ) -> Script:
        """Parse the arguments ``args`` of ``target``.  Never fails: see ``readable``."""
        try:
            recover, readable = config_from_argv(args, environ), True
        except UserError:
            recover, readable = RecoverConfig(enabled="--recover" in args), False
        return cls(target, tuple(args), recover, readable, _given(args))

    @cached_property
    def takes_megatron_flags(self) -> bool:
        """True if the script is named pretrain_* (not *.sh), or imports Megatron's ``pretrain``."""
        named = Path(self.target).stem.startswith("pretrain_") and not self.target.endswith(".sh")
        return named or imports(self.target, *PRETRAIN)

    @cached_property
    def loads(self) -> bool:
        """True if the script imports ``load`` of this package, in which a prepared process waits, at its top level."""
        return imports(self.target, *LOAD, top_level=True)

    @property
    def is_known(self) -> bool:
        """True if the script certainly takes Megatron's flags: the shipped script, or a likely one with --recover."""
        return self.takes_megatron_flags and ("--recover" in self.args or self.is_shipped)

    @property
    def is_shipped(self) -> bool:
        return Path(self.target).stem == TRAINING

    @property
    def saves_checkpoints(self) -> bool:
        """True if the script's --save is Megatron's flag, which names a folder of checkpoints."""
        return self.takes_megatron_flags or "--recover" in self.args

    @property
    def spares(self) -> int:
        """Value of ``--recover-spares``; 0 without ``--recover``, and for a value that the checks refuse."""
        return max(0, self.recover.spares) if self.recover.enabled else 0

    @property
    def times(self) -> RecoverConfig:
        """Values for the coordinator: ``recover``, or the defaults if a value is invalid or values contradict."""
        return RecoverConfig() if problems(replace(self.recover, coordinator=None)) else self.recover

    @property
    def alike(self) -> dict[str, str]:
        """Flags whose values must be the same on all nodes (``script_flags``)."""
        return script_flags.flags_of(self.args, self.recover.may_differ.split(","))

    @property
    def sizes_elsewhere(self) -> bool:
        """True if Megatron reads the sizes of a replica from a file."""
        return any(name in self.given for name in SIZES_ELSEWHERE)

    def last(self, name: str, default: str) -> str:
        """Return the last value of the flag ``name``, or ``default``.  Raises ValueError for a flag without a value."""
        *_, value = self.given.get(name, [default])
        return value

    def number(self, name: str, default: int) -> int:
        """Return the last value of the flag ``name``, or ``default``.  Raises ValueError if it is no whole number."""
        return int(self.last(name, str(default)))

    def training(self, world: int) -> Training | None:
        """Return the shape of a training of ``world`` workers.

        Return None if a file defines the shape, or if a flag that defines it has an invalid value.
        """
        if self.sizes_elsewhere or not self.readable:
            return None
        try:
            return self._training(world)
        except (ValueError, ArithmeticError):
            return None

    def _training(self, world: int) -> Training:
        sizes = {size: self.number(name, 1) for size, name in SIZES.items()}
        expert, fsdp = self.number(EXPERT, 1), FSDP in self.given
        instances = self.number(INSTANCES, 1)
        if fsdp:
            instances = max(instances, 2)  # --recover sets at least two instances (``megatron_hooks.entry.refused``)
        expert_tensor = self.number(EXPERT_TENSOR, sizes["tensor"])
        inner_ranks = data_parallel_ranks_per_replica(
            tensor=sizes["tensor"], context=sizes["context"], expert=expert, expert_tensor=expert_tensor
        )
        spread = self.last(OUTER, "no_shard") == "optim" if fsdp else SPREAD in self.given
        return Training(
            **sizes,
            inner_ranks=max(1, world // prod(sizes.values()) // instances) if fsdp else inner_ranks,
            pipeline_before_data=MAPPING in self.given,
            experts=expert > 1,
            spread=spread,
            shard_groups=fsdp,
            shadows=self.recover.shadow_shards,
            instances=1 if fsdp else instances,
            memory=self.recover.memory_tier != "off",
            checkpoint=not self.no_rollback_reason,
            across=self.recover.allow_cross_node_tp,
            blocks=sizes["pipeline"] == 1 or expert * expert_tensor == sizes["tensor"] * sizes["context"],
        )

    @property
    def no_rollback_reason(self) -> str:
        """Why live workers cannot load a checkpoint (see ``megatron_hooks.layout``); empty if they can.

        Raises ValueError if ``--ckpt-format`` has no value.
        """
        formats = self.last(FORMAT, "torch_dist")
        if "off" in self.given.get(LAST_RESORT, []):
            return f"{LAST_RESORT} off"
        if not any(name in self.given for name in FOLDERS):
            return NO_SAVE
        if "--no-save-optim" in self.given:
            return "--no-save-optim"
        if FSDP in self.given:
            return ""
        if SPREAD in self.given:
            return "" if formats in ("torch_dist", "torch") else f"{FORMAT} {formats}"
        return "--optimizer sgd" if formats == "torch_dist" and self.given.get("--optimizer") == ["sgd"] else ""


def _given(args: Sequence[str]) -> dict[str, Sequence[str]]:
    """Return flag -> the words after it, as argparse divides them; every word that begins with "--" is a flag."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in dict.fromkeys(word.partition("=")[0] for word in args if word.startswith("--")):
        if len(name) > 2 and " " not in name:  # argparse takes a word with a space as a value
            parser.add_argument(name, nargs="*", dest=name)
    try:
        values, _ = parser.parse_known_args(list(args))
    except argparse.ArgumentError:
        return {}
    return {name: value for name, value in vars(values).items() if value is not None}
