"""What a model and an optimizer must be so that all workers can train them alike: checked before the first step."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from recover_megatron import program
from recover_megatron.elastic.state import Stateful
from recover_megatron.errors import EXIT_USAGE, UserError, refuse, traceback_wanted
from recover_megatron.instep.comparison import OwnDescription, Told, odd_ones
from recover_megatron.logger import get_logger
from recover_megatron.membership.records import Json
from recover_megatron.membership.session import Session
from recover_megatron.variables import COORDINATOR_VARIABLE, REPLACED_VARIABLE

log = get_logger(__name__)


def strange_parameters(optimizer: torch.optim.Optimizer, known: set[int]) -> int:
    """How many parameters it trains that are not among ``known``."""
    parameters = (parameter for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"])
    return sum(parameter.requires_grad and id(parameter) not in known for parameter in parameters)


def check(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.Tensor],
    microbatches: int,
    state: Mapping[str, Stateful],
) -> None:
    """Refuse with all reasons against training this: under recover-run by exit code 2, else by UserError."""
    reasons = []
    if COORDINATOR_VARIABLE not in os.environ:
        reasons.append("this process has no coordinator: start it with recover-run --elastic SCRIPT (one worker, too)")
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
    if more := strange_parameters(optimizer, set(map(id, parameters))):
        reasons.append(
            f"the optimizer has {more} parameter(s) that the model does not have: nobody would sum their gradients; "
            "put all that is trained in one module"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        reasons.append(
            f"{type(optimizer).__name__} wants a closure, which computes the gradients again and again in one step: "
            "each step has its sum once here; take an optimizer whose step() goes without"
        )
    running = [name for name, module in model.named_modules() if getattr(module, "track_running_stats", False)]
    if running:
        reasons.append(
            f"{', '.join(running[:5])}: running statistics change with each forward pass, on each worker by itself: "
            "take another norm, or track_running_stats=False"
        )
    if taken := sorted({"model", "optimizer"} & set(state)):
        reasons.append(f"state: the names {', '.join(taken)} are taken")
    if REPLACED_VARIABLE in os.environ and dist.is_initialized() and dist.get_world_size() > 1:
        reasons.append(
            f"there is a process group of {dist.get_world_size()} workers, and a worker that is started in place of a "
            "lost one cannot take part in it: leave init_process_group() out, make a group of one process "
            "(docs/library.md), or leave --max-restarts out"
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
