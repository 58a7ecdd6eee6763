"""What a run of the fork server writes down for a comparison: the same instruments, whoever's script runs."""

from __future__ import annotations

import json
from typing import Any


def record_losses(path: str) -> None:
    """Write what train_step returns, whoever's script runs: the same instrument for both sides of a comparison."""
    from megatron.training import training

    train_step = training.train_step

    def recording_train_step(*args: Any, **kwargs: Any) -> Any:
        result = train_step(*args, **kwargs)
        numbers = {"loss": result[0].get("lm loss"), "grad_norm": result[5]}
        with open(path, "a", encoding="utf-8") as file:
            row = {name: None if value is None else float(value) for name, value in numbers.items()}
            file.write(json.dumps(row) + "\n")
        return result

    # What --recover wraps is checked by its parameters: keep those of the original.
    recording_train_step.__wrapped__ = train_step  # type: ignore[attr-defined]
    training.train_step = recording_train_step


def write_before_kills() -> None:
    """A worker that is killed by an injected fault has written the events and steps that it told before.

    Else a slow disk would decide whether the plan is in the log of an epoch whose writer was killed.
    """
    from recover_megatron import log_writer
    from recover_megatron.chaos.spec import Injector, Kind

    make, inject = log_writer.LogWriter.__init__, Injector._inject
    files: list[log_writer.LogWriter] = []

    def noted_init(self: log_writer.LogWriter, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        files.append(self)

    def inject_when_written(self: Injector, fault: Any) -> None:
        if fault.kind is Kind.KILL:
            log_writer.flush_all(files)
        inject(self, fault)

    log_writer.LogWriter.__init__ = noted_init  # type: ignore[method-assign]
    Injector._inject = inject_when_written  # type: ignore[method-assign]


def record_training(path: str) -> None:
    """Write, when the training is over, the parameters ({chunk and name: tensor}) and the loss of each evaluation.

    And the biases of routers, and the digests of a distributed optimizer's state, of each unit that this worker holds.
    """
    import torch
    from megatron.training import get_args, training

    train, evaluate = training.train, training.evaluate
    evaluations: dict[int, float] = {}

    def recording_evaluate(*args: Any, **kwargs: Any) -> Any:
        result = evaluate(*args, **kwargs)
        if result[0] and "lm loss" in result[0]:
            evaluations[get_args().curr_iteration + 1] = float(result[0]["lm loss"])  # made again: the last one counts
        return result

    def recording_train(forward_step_func: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        result = train(forward_step_func, model, optimizer, *args, **kwargs)
        named = {f"{n} {name}": p for n, chunk in enumerate(model) for name, p in _named(chunk)}
        parameters = {name: p.detach().clone() for name, p in named.items()}
        buffers = {f"{n} {name}": b for n, chunk in enumerate(model) for name, b in chunk.named_buffers()}
        biases = {name: b.clone() for name, b in buffers.items() if name.endswith(("expert_bias", "qb_beta"))}
        units = _units(optimizer)
        torch.save({"parameters": parameters, "biases": biases, "evaluations": evaluations, "units": units}, path)
        return result

    # What --recover wraps is checked by its parameters: keep those of the originals.
    recording_evaluate.__wrapped__, recording_train.__wrapped__ = evaluate, train  # type: ignore[attr-defined]
    training.evaluate, training.train = recording_evaluate, recording_train


def _named(chunk: Any) -> Any:
    """A chunk's parameters; with Megatron-FSDP this worker's shards of them, as the optimizer updates them.

    As the model computes with them where the optimizer's state is spread over the shard groups.
    """
    from megatron.training import get_args

    if not hasattr(chunk, "param_and_grad_buffer"):
        return [(name, getattr(its.data, "_local_tensor", its.data)) for name, its in chunk.named_parameters()]
    buffer = chunk.param_and_grad_buffer
    if get_args().outer_dp_sharding_strategy == "optim":
        weights = [(group, item) for group in buffer.parameter_groups for item in range(len(group.params))]
        return [
            (f"{buffer.param_to_name[group.params[item]]}", group.model_weight_buffer.get_item(item, only_shard=True))
            for group, item in weights
        ]
    return [(name, parameter.data._local_tensor) for name, parameter in buffer.optimizer_named_parameters]


def _units(optimizer: Any) -> dict[tuple[int, int], int]:
    """(number of the optimizer, unit) -> digest of its state, where that is spread over the workers."""
    from recover_megatron.megatron_hooks.optimizer.shard_fragments import ShardFragments

    found: dict[tuple[int, int], int] = {}
    for number, one in enumerate(getattr(optimizer, "chained_optimizers", [optimizer])):
        fragments = getattr(getattr(one, "_copy_main_params_to_model_params", None), "__self__", None)
        if isinstance(fragments, ShardFragments):
            found |= {(number, unit): fragments.digest(unit).value for unit in fragments.held}
    return found
