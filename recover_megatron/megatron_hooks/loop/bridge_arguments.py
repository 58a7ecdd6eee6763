"""Megatron-Bridge's configuration and counters under the names of Megatron's flags, and what of them is refused.

Bridge's configuration has a section per matter, whose fields have the names of Megatron's flags with few exceptions
(``_OTHERWISE``); its counters are in the ``TrainState``.  Nothing is copied: what the hooks set is Bridge's own, save
what is in ``OWN``: Megatron's loop reads three counters when it is entered, and Bridge's goes on counting.

What is refused with --recover was not tried, or could not be kept exact (``problems``).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from recover_megatron.arguments import RecoverConfig
from recover_megatron.megatron_hooks.checkpoint.resumed import SHUFFLED_FOR
from recover_megatron.megatron_hooks.entry.refused import SETTLED, cannot_recover, cannot_shard, cannot_use_nccl
from recover_megatron.megatron_hooks.gradients.maxima import LOGIT_FLAGS

SECTIONS = (
    "model", "train", "validation", "optimizer", "ddp", "dist", "rng", "rerun_state_machine", "checkpoint", "dataset",
    "scheduler", "logger", "tokenizer", "profiling",
)  # fmt: skip
"""Of the configuration, in the order in which a name is looked for."""

COUNTERS = (
    "consumed_train_samples",
    "skipped_train_samples",
    "consumed_valid_samples",
    "do_train",
    "do_valid",
    "do_test",
)
"""What the ``TrainState`` has."""

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
    "no_way_back": lambda config: "Megatron-Bridge's own load of a checkpoint was not tried in the middle of a run",
    "no_save_rng": lambda config: not config.checkpoint.save_rng,
    "full_validation": lambda config: False,
    "multiple_validation_sets": lambda config: False,
    # Bridge opens its writers when the last rank asks for them, whoever that is: no stand-in is needed.
    "tensorboard_dir": lambda config: None,
    "wandb_project": lambda config: None,
}


class BridgeArguments:
    """What ``megatron.training.get_args()`` returns under Bridge.  ``config``: its ``ConfigContainer``, up to date."""

    def __init__(self, config: Any) -> None:
        own = dict.fromkeys(OWN, 0) | {"config": config, "train_state": None}
        own |= {"rank": int(os.environ.get("RANK", "0")), "world_size": int(os.environ.get("WORLD_SIZE", "1"))}
        object.__setattr__(self, "_own", own)

    def attach(self, config: Any, train_state: Any) -> None:
        """A run begins to be set up: this is its configuration, and these are its counters."""
        self._own.update(config=config, train_state=train_state)

    def loaded(self) -> None:
        """The training is about to begin, from a checkpoint perhaps: take over where."""
        state = self._own["train_state"]
        self.iteration = self.curr_iteration = state.step
        self.num_floating_point_operations_so_far = state.floating_point_operations_so_far

    def entered(self) -> None:
        """Bridge's loop is about to be entered: it begins where Megatron's would, which reads that here."""
        state = self._own["train_state"]
        state.step = self.curr_iteration = self.iteration
        state.floating_point_operations_so_far = self.num_floating_point_operations_so_far

    @property
    def config(self) -> Any:
        """Bridge's ``ConfigContainer``."""
        return self._own["config"]

    @property
    def step(self) -> int:
        """How many iterations Bridge has counted."""
        return int(self._own["train_state"].step)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_own":  # a copy is being made
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
        """That which has such a field.  Raises AttributeError where none has."""
        config = self._own["config"]
        for section in (getattr(config, each, None) for each in SECTIONS):
            for holder in (section, getattr(section, "transformer", None)):
                if holder is not None and hasattr(holder, name):
                    return holder
        raise AttributeError(f"Megatron-Bridge's configuration has nothing by the name of {name}")


NOT_TRIED = {
    "dist.use_decentralized_pg": "the hooks know the process groups of Megatron-Core's parallel state alone",
    "dist.use_torch_fsdp2": "its groups can't be changed",
    "dist.use_megatron_fsdp": "it was not tried with this loop",
    "ddp.use_megatron_fsdp": "it was not tried with this loop",
    "checkpoint.async_save": "it was not tried with this loop",
    "checkpoint.non_persistent_save_interval": "local checkpoints are of workers that may be gone",
    "checkpoint.also_save_hf_checkpoint": "it gathers the weights over replicas in a place that was not tried",
    "train.num_epochs": "its batches are not known by the numbers of their samples",
    "train.iterations_to_skip": "Bridge counts skipped samples by the replicas that are left",
    "optimizer.optimizer_cuda_graph": "a replayed graph passes none of the places where microbatches are counted",
    "model.moe_expert_rank_capacity_factor": "it runs a whole iteration again",
    "peft": "it was not tried",
    "nvrx_straggler": "it gathers times over all replicas; recover-report shows each replica's seconds",
    "tensor_inspect": "it sums over replicas in the step",
    "logger.log_progress": "it compares the number of workers with that of the launch",
    "validation.eval_context_parallel_size": "it makes process groups of its own for an evaluation",
    "dist.eval_context_parallel_size": "it makes process groups of its own for an evaluation",
}
"""Where it is set -> why it is refused."""


SIZES = ("context_parallel_size", "expert_model_parallel_size", "virtual_pipeline_model_parallel_size")
"""Of the model: what was not tried."""


def _value(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = getattr(config, name, None)
    return config


def problems(config: Any, recover: RecoverConfig) -> list[str]:
    """Every reason why this run cannot start, one line each.  ``config``: up to date (``runtime_config_update``)."""
    arguments: Any = BridgeArguments(config)
    found = [f"{path} = {value!r}: {why}" for path, why in NOT_TRIED.items() if (value := _value(config, path))]
    if hasattr(config.dataset, "collate_fn") or not hasattr(config.dataset, "random_seed"):
        found.append(f"dataset: {type(config.dataset).__name__}: pre-training with GPTDatasetConfig alone was tried")
    found += [f"{its.flag}: {its.words}" for its in SETTLED if its.given(arguments)]
    found += [
        f"model.{name}: it was not tried with this loop" for name in LOGIT_FLAGS if getattr(arguments, name, False)
    ]
    sizes = {name: _value(config.model, name) or 1 for name in SIZES}
    found += [f"model.{name} = {size}: it was not tried with this loop" for name, size in sizes.items() if size > 1]
    found = [f"--recover with Megatron-Bridge cannot take {reason}" for reason in found]
    return found + cannot_recover(arguments, recover) + cannot_shard(arguments, recover) + cannot_use_nccl(recover)
