"""Megatron-Bridge's configuration and counters under the names of Megatron's flags, and refusals of some settings.

Bridge's configuration has sections, whose fields have the names of Megatron's flags with few exceptions
(``_OTHERWISE``).  Its counters are in the ``TrainState``.  The hooks read and set Bridge's own fields, except for the
names in ``OWN``, which have separate values.  Three of these are counters that Megatron's loop reads only when it
starts, whereas Bridge's loop counts in the fields of the ``TrainState``.

``problems`` refuses a setting if it is untested with --recover, or if recovery would not be exact.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from recover_megatron.arguments import RecoverConfig
from recover_megatron.megatron_hooks.checkpoint.resumed import SHUFFLED_FOR
from recover_megatron.megatron_hooks.entry.refused import ADJUSTED, cannot_recover, cannot_shard, cannot_use_nccl
from recover_megatron.megatron_hooks.gradients.maxima import LOGIT_FLAGS

SECTIONS = (
    "model", "train", "validation", "optimizer", "ddp", "dist", "rng", "rerun_state_machine", "checkpoint", "dataset",
    "scheduler", "logger", "tokenizer", "profiling",
)  # fmt: skip
"""Sections of Bridge's configuration, in the order in which they are searched for a field."""

COUNTERS = (
    "consumed_train_samples",
    "skipped_train_samples",
    "consumed_valid_samples",
    "do_train",
    "do_valid",
    "do_test",
)
"""Names of arguments that are read from and written to Bridge's ``TrainState``."""

OWN = (
    "iteration", "curr_iteration", "num_floating_point_operations_so_far", "rank", "world_size", SHUFFLED_FOR,
)  # fmt: skip

_OTHERWISE: dict[str, Callable[[Any], Any]] = {
    "seed": lambda config: config.rng.seed,
    "optimizer": lambda config: config.optimizer.optimizer,
    "data_parallel_size": lambda config: config.data_parallel_size,
    "num_experts": lambda config: getattr(config.model, "num_moe_experts", None),
    "use_megatron_fsdp": lambda config: config.dist.use_megatron_fsdp or config.ddp.use_megatron_fsdp,
    "use_torch_fsdp2": lambda config: config.dist.use_torch_fsdp2,
    "inprocess_restart": lambda config: config.inprocess_restart is not None and config.inprocess_restart.enabled,
    "enable_ft_package": lambda config: config.ft is not None and config.ft.enable_ft_package,
    "no_load_optim": lambda config: not config.checkpoint.load_optim,
    "no_rollback_reason": lambda config: "Megatron-Bridge's load of a checkpoint in the middle of a run is untested",
    "no_save_rng": lambda config: not config.checkpoint.save_rng,
    "full_validation": lambda config: False,
    "multiple_validation_sets": lambda config: False,
    # None, so that no ``Stub`` replaces Bridge's writers: the current last rank opens them when it first logs.
    "tensorboard_dir": lambda config: None,
    "wandb_project": lambda config: None,
}


class BridgeArguments:
    """Object that ``megatron.training.get_args()`` returns with Bridge.

    ``config``: the ``ConfigContainer``, after ``runtime_config_update``.
    """

    def __init__(self, config: Any) -> None:
        own = dict.fromkeys(OWN, 0) | {"config": config, "train_state": None}
        own |= {"rank": int(os.environ.get("RANK", "0")), "world_size": int(os.environ.get("WORLD_SIZE", "1"))}
        object.__setattr__(self, "_own", own)

    def attach(self, config: Any, train_state: Any) -> None:
        """Set the configuration and the counters of the run that is being set up."""
        self._own.update(config=config, train_state=train_state)

    def loaded(self) -> None:
        """Set the counters in ``OWN`` to the counters with which the run starts, perhaps from a checkpoint."""
        state = self._own["train_state"]
        self.iteration = self.curr_iteration = state.step
        self.num_floating_point_operations_so_far = state.floating_point_operations_so_far

    def entered(self) -> None:
        """Set Bridge's counters to the counters in ``OWN``, before Bridge's loop is entered."""
        state = self._own["train_state"]
        state.step = self.curr_iteration = self.iteration
        state.floating_point_operations_so_far = self.num_floating_point_operations_so_far

    @property
    def config(self) -> Any:
        """Bridge's ``ConfigContainer``."""
        return self._own["config"]

    @property
    def step(self) -> int:
        """Number of iterations that Bridge has counted."""
        return int(self._own["train_state"].step)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_own":  # ``copy`` reads such attributes before ``_own`` exists
            raise AttributeError(name)
        own = self._own
        if name in OWN:
            return own[name]
        if name in COUNTERS and own["train_state"] is not None:
            return getattr(own["train_state"], name)
        if name in _OTHERWISE:
            return _OTHERWISE[name](own["config"])
        return getattr(self._section(name), name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = self._own
        if name in OWN:
            own[name] = value
        elif name in COUNTERS:
            setattr(own["train_state"], name, value)
        else:
            setattr(self._section(name), name, value)

    def _section(self, name: str) -> Any:
        """Return the section that has the field ``name``.  Raises AttributeError if no section has it."""
        config = self._own["config"]
        for section in (getattr(config, each, None) for each in SECTIONS):
            for holder in (section, getattr(section, "transformer", None)):
                if holder is not None and hasattr(holder, name):
                    return holder
        raise AttributeError(f"Megatron-Bridge's configuration has no field {name}")


NOT_TRIED = {
    "dist.use_decentralized_pg": "--recover can only replace the process groups of Megatron-Core's parallel state",
    "dist.use_torch_fsdp2": "its process groups cannot be changed",
    "dist.use_megatron_fsdp": "it is untested with this loop",
    "ddp.use_megatron_fsdp": "it is untested with this loop",
    "checkpoint.async_save": "it is untested with this loop",
    "checkpoint.non_persistent_save_interval": "a local checkpoint is lost with the worker that wrote it",
    "checkpoint.also_save_hf_checkpoint": "it gathers the weights over replicas, which is untested",
    "train.num_epochs": "recovery needs batches that are identified by sample numbers",
    "train.iterations_to_skip": "Bridge computes the number of skipped samples from the number of live replicas",
    "optimizer.optimizer_cuda_graph": "a replayed graph bypasses the code that counts microbatches",
    "model.moe_expert_rank_capacity_factor": "Bridge may then repeat a complete iteration",
    "peft": "it is untested",
    "nvrx_straggler": "it gathers times over all replicas; use recover-report, which shows each replica's seconds",
    "tensor_inspect": "it sums over replicas within the step",
    "logger.log_progress": "Bridge compares the number of workers with the number at launch",
    "validation.eval_context_parallel_size": "it creates separate process groups for an evaluation",
    "dist.eval_context_parallel_size": "it creates separate process groups for an evaluation",
}
"""Path of a setting in Bridge's configuration -> reason why --recover refuses it."""


SIZES = ("context_parallel_size", "expert_model_parallel_size", "virtual_pipeline_model_parallel_size")
"""Parallel sizes in Bridge's model section that are refused above 1, because they are untested."""


def _value(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = getattr(config, name, None)
    return config


def problems(config: Any, recover: RecoverConfig) -> list[str]:
    """Return every reason why a run with ``config`` cannot start with --recover, one line each.

    ``config``: the ``ConfigContainer``, after ``runtime_config_update``.
    """
    arguments: Any = BridgeArguments(config)
    found = [f"{path} = {value!r}: {why}" for path, why in NOT_TRIED.items() if (value := _value(config, path))]
    if hasattr(config.dataset, "collate_fn") or not hasattr(config.dataset, "random_seed"):
        found.append(f"dataset: {type(config.dataset).__name__}: only pre-training with GPTDatasetConfig is tested")
    found += [f"{one.flag}: {one.words}" for one in ADJUSTED if one.given(arguments)]
    found += [f"model.{name}: it is untested with this loop" for name in LOGIT_FLAGS if getattr(arguments, name, False)]
    sizes = {name: _value(config.model, name) or 1 for name in SIZES}
    found += [f"model.{name} = {size}: it is untested with this loop" for name, size in sizes.items() if size > 1]
    found = [f"--recover with Megatron-Bridge does not support {reason}" for reason in found]
    return found + cannot_recover(arguments, recover) + cannot_shard(arguments, recover) + cannot_use_nccl(recover)
