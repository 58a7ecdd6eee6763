"""Checks that all workers can train alike: of the model and the optimizer when a training begins, and of what the
function ``backward=`` does in each step.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from recover_megatron import program
from recover_megatron.collectives.comparison import OwnDescription, Told, odd_ones
from recover_megatron.collectives.ledger import is_distributed
from recover_megatron.elastic.state import Optimizers, Stateful
from recover_megatron.errors import EXIT_USAGE, UserError, refuse, traceback_wanted
from recover_megatron.logger import get_logger
from recover_megatron.membership.io.session import Session
from recover_megatron.membership.records import Json
from recover_megatron.variables import COORDINATOR_VARIABLE, REPLACED_VARIABLE

log = get_logger(__name__)

_SUMMING = {"DistributedDataParallel", "FullyShardedDataParallel"}
"""Wrappers of torch with a process group; the second one's module takes long to import."""

type Optimizer = torch.optim.Optimizer | Optimizers


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"]]


def strange_parameters(optimizer: Optimizer, known: set[int]) -> int:
    """Count the parameters that ``optimizer`` trains and that are not among ``known``."""
    return sum(parameter.requires_grad and id(parameter) not in known for parameter in _parameters(optimizer))


def check_backward(arrived: Sequence[torch.Tensor], microbatch: str, *, value: bool) -> None:
    """Raise RuntimeError unless ``backward=`` has added the gradient of a loss once, and as it is.

    ``arrived``: the gradients that have arrived at the loss which ``backward=`` was given: one for each time that it
    went back from there, and each is the factor of all gradients behind it.  ``value``: look at the factor, too, which
    waits for the device.
    """
    if not arrived:
        raise RuntimeError(
            f"{microbatch}: backward= did not go back from the loss that it was given, so nothing was added: call "
            "loss.backward() in it, or let the microbatch return loss.detach() where it goes back by itself"
        )
    if len(arrived) > 1:
        raise RuntimeError(
            f"{microbatch}: backward= has gone back {len(arrived)} times from the loss that it was given: each "
            "microbatch is added once (what calls torch.autograd.grad on the loss belongs into the microbatch)"
        )
    if value and not 0.99 < (factor := float(arrived[0])) < 1.01:  # a bfloat16 may be off by 0.004
        raise RuntimeError(
            f"{microbatch}: backward= multiplies the gradient by {factor:g}, and the optimizer would step with that: "
            "the library itself divides the loss by the number of microbatches, and there is no gradient scaling for "
            "fp16.  With accelerate write Accelerator(gradient_accumulation_steps=1), and mixed_precision='bf16' in "
            "place of 'fp16'; elsewhere leave the division, or the GradScaler, out of backward="
        )


def check(
    model: torch.nn.Module,
    optimizer: Optimizer,
    parameters: Sequence[torch.Tensor],
    microbatches: int,
    state: Mapping[str, Stateful],
    *,
    again: bool,
) -> None:
    """Refuse with all reasons against training this: under recover-run by exit code 2, else by UserError.

    ``again``: this process has trained, or trains, another model.
    """
    reasons = []
    if COORDINATOR_VARIABLE not in os.environ:
        reasons.append("this process has no coordinator: start it with recover-run --elastic SCRIPT (one worker, too)")
    if again:
        reasons.append(
            "this process has made an ElasticDataParallel before, and a process takes part in a run only once: give "
            "several models to one, ElasticDataParallel([model_a, model_b], [optimizer_a, optimizer_b], ...); train "
            "one after the other in two runs"
        )
    if microbatches < 1:
        reasons.append(f"microbatches is {microbatches}: a step has at least one")
    if not parameters:
        reasons.append("the model has no parameter that is trained")
    if strange := sorted({str(parameter.dtype) for parameter in parameters if not parameter.is_floating_point()}):
        reasons.append(f"parameters of {', '.join(strange)} are trained: gradients must be floating-point")
    if len(devices := {str(parameter.device) for parameter in parameters}) > 1:
        reasons.append(f"the parameters are on several devices ({', '.join(sorted(devices))}): put them on one")
    if any(parameter.is_meta for parameter in parameters):
        reasons.append("parameters are on the device meta, without memory: to_empty() and initialize them before")
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if sharded := [name for name, its in tensors.items() if is_distributed(its)]:
        others = f" and {len(sharded) - 5} more" if len(sharded) > 5 else ""
        reasons.append(
            f"{', '.join(sharded[:5])}{others}: distributed tensors (DTensor): each worker holds the whole model here, "
            "in plain tensors.  Leave fully_shard(), parallelize_module() and distribute_tensor() out, over a mesh of "
            "one process, too; a model that one device cannot hold is sharded in a loop of your own (docs/ring.md)"
        )
    wrappers = [
        its
        for its in model.modules()
        if _SUMMING & {kind.__name__ for kind in type(its).__mro__} and hasattr(its, "process_group")
    ]
    if several := {type(its).__name__ for its in wrappers if its.process_group.size() > 1}:
        reasons.append(
            f"{', '.join(sorted(several))} over several processes: the workers would wait for each other in each pass, "
            "and fail when one dies: give the model as it is, without it"
        )
    if more := strange_parameters(optimizer, set(map(id, parameters))):
        reasons.append(
            f"the optimizer has {more} parameter(s) that the model does not have: nobody would sum their gradients; "
            "put all that is trained in the model, or in the list of models"
        )
    if twice := len(trained := _parameters(optimizer)) - len(set(map(id, trained))):
        reasons.append(f"{twice} parameter(s) are in several of the optimizers: each of these would step them")
    for each in optimizer.optimizers if isinstance(optimizer, Optimizers) else [optimizer]:
        closure = inspect.signature(each.step).parameters.get("closure")
        if closure is None or closure.default is not inspect.Parameter.empty:
            continue
        reasons.append(
            f"{type(each).__name__} wants a closure, which computes the gradients again and again in one step: "
            "each step has its sum once here; take an optimizer whose step() goes without"
        )
    norms = [(name, its) for name, its in model.named_modules() if getattr(its, "track_running_stats", False)]
    if counting := [name for name, its in norms if its.training]:
        others = f" and {len(counting) - 5} more" if len(counting) > 5 else ""
        reasons.append(
            f"{', '.join(counting[:5])}{others}: running statistics change with each forward pass in train mode, on "
            "each worker by itself: take a norm without them (GroupNorm, LayerNorm); where the statistics are to stay "
            "as they are, call .eval() on these layers, before this and after each model.train()"
        )
    if taken := sorted({"model", "optimizer"} & set(state)):
        reasons.append(f"state: the names {', '.join(taken)} are taken")
    if REPLACED_VARIABLE in os.environ and dist.is_initialized() and dist.get_world_size() > 1:
        reasons.append(
            f"there is a process group of {dist.get_world_size()} workers, and a worker that is started in place of a "
            "lost one cannot take part in it: leave init_process_group() out, make a group of one process "
            "(docs/integrate.md), or leave --max-restarts out"
        )
    if reasons and COORDINATOR_VARIABLE in os.environ and not traceback_wanted():
        refuse(os.path.basename(sys.argv[0]), reasons)
    if reasons:
        raise UserError(*reasons)


_AT_IMPORT = program.describe()
"""The program as it was loaded by then: its files may be edited before the model is built."""


def loaded_program() -> dict[str, str]:
    """Describe the program of this process, with the text that each module had when this package was imported."""
    return {**program.describe(), **_AT_IMPORT}


def some_differ(own: OwnDescription, worker: int, holds: bool, statuses: Mapping[int, Json], session: Session) -> bool:
    """Tell if a worker is known to differ from the run by what all have joined with: then the epoch is not begun.

    Ends the process where that is this worker, and the run where it has a state (``holds``): then both are of the
    launch.
    """
    told = {each: Told.of(status, "holds", "holds", "address") for each, status in statuses.items()}
    odd = odd_ones(told)
    different = own.different(worker, told, odd)
    if different and not holds:
        log.info(f"worker {worker} ends, and the run goes on without it: it {different}")
        sys.exit(EXIT_USAGE)
    if different:
        session.give_up(EXIT_USAGE, f"worker {worker} {different}")
    return bool(different or odd.workers)
