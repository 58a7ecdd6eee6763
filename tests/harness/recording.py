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


def record_training(path: str) -> None:
    """Write, when the training is over, the parameters ({chunk and name: tensor}) and the loss of each evaluation.

    And of a distributed optimizer, for each unit that this worker holds, the digest of its state.
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
        named = {f"{n} {name}": p for n, chunk in enumerate(model) for name, p in chunk.named_parameters()}
        parameters = {name: p.detach().clone() for name, p in named.items()}
        torch.save({"parameters": parameters, "evaluations": evaluations, "units": _units(optimizer)}, path)
        return result

    # What --recover wraps is checked by its parameters: keep those of the originals.
    recording_evaluate.__wrapped__, recording_train.__wrapped__ = evaluate, train  # type: ignore[attr-defined]
    training.evaluate, training.train = recording_evaluate, recording_train


def _units(optimizer: Any) -> dict[tuple[int, int], int]:
    """(number of the optimizer, unit) -> digest of its state, where that is spread over the workers."""
    from recover_megatron.megatron_hooks.optimizer.shard_fragments import ShardFragments

    found: dict[tuple[int, int], int] = {}
    for number, one in enumerate(getattr(optimizer, "chained_optimizers", [optimizer])):
        fragments = getattr(getattr(one, "_copy_main_params_to_model_params", None), "__self__", None)
        if isinstance(fragments, ShardFragments):
            found |= {(number, unit): fragments.digest(unit).value for unit in fragments.held}
    return found
