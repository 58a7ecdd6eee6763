"""Checks of model, optimizer and program at the start, and of ``backward=`` in each step."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from recover_megatron import program
from recover_megatron.collectives.comparison import ComparedStatus, OwnDescription, odd_ones
from recover_megatron.collectives.ledger import is_distributed
from recover_megatron.elastic.run_state import Optimizers, Stateful
from recover_megatron.errors import EXIT_USAGE, UserError, refuse, traceback_wanted
from recover_megatron.logger import get_logger
from recover_megatron.membership.io.session import Session
from recover_megatron.membership.records import Json
from recover_megatron.variables import COORDINATOR_VARIABLE, REPLACED_VARIABLE

log = get_logger(__name__)

_SUMMING = {"DistributedDataParallel", "FullyShardedDataParallel"}
"""Class names of torch's wrappers that use a process group.  The classes are not imported: FSDP's import is slow."""

type Optimizer = torch.optim.Optimizer | Optimizers


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"]]


def strange_parameters(optimizer: Optimizer, known: set[int]) -> int:
    """Return how many trainable parameters of ``optimizer`` are not in ``known``, a set of ``id(parameter)``."""
    return sum(parameter.requires_grad and id(parameter) not in known for parameter in _parameters(optimizer))


def check_backward(arrived: Sequence[torch.Tensor], microbatch: str, *, value: bool) -> None:
    """Raise RuntimeError unless ``backward=`` has added the unscaled gradient of a loss exactly once.

    ``arrived``: gradients that arrived at the loss passed to ``backward=``, one per backward pass from this loss.  The
    gradient must be 1, since all other gradients are multiplied by it.  ``value``: True to check this, too; for this
    check, the host waits for the device.
    """
    if not arrived:
        raise RuntimeError(
            f"{microbatch}: backward= ran no backward pass from the loss it received, so no gradient was added: call "
            "loss.backward() in it, or return loss.detach() from a microbatch that runs its backward pass itself"
        )
    if len(arrived) > 1:
        raise RuntimeError(
            f"{microbatch}: backward= ran {len(arrived)} backward passes from the loss it received: each microbatch "
            "must be added once (call torch.autograd.grad on the loss in the microbatch instead)"
        )
    if value and not 0.99 < (factor := float(arrived[0])) < 1.01:  # in bfloat16 the factor has an error of up to 0.004
        raise RuntimeError(
            f"{microbatch}: backward= scales the gradient by {factor:g}, which would change the optimizer's step: the "
            "library already divides the loss by the number of microbatches, and gradient scaling for fp16 is not "
            "supported.  With accelerate use Accelerator(gradient_accumulation_steps=1), and mixed_precision='bf16' "
            "instead of 'fp16'; otherwise remove the division, or the GradScaler, from backward="
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
    """Check that the model and the optimizer are supported.

    If they are not, print all reasons and exit with code 2; without recover-run, raise UserError with all reasons.
    ``again``: True if this process has created an ElasticDataParallel before.
    """
    reasons = []
    if COORDINATOR_VARIABLE not in os.environ:
        reasons.append("this process has no coordinator: start even a single worker with recover-run --elastic SCRIPT")
    if again:
        reasons.append(
            "this process has created an ElasticDataParallel before, and a process can join a run only once: pass "
            "several models to one, ElasticDataParallel([model_a, model_b], [optimizer_a, optimizer_b], ...), or "
            "train them in separate runs"
        )
    if microbatches < 1:
        reasons.append(f"microbatches is {microbatches}: a step needs at least 1")
    if not parameters:
        reasons.append("the model has no trainable parameter: set requires_grad on at least one parameter")
    if strange := sorted({str(parameter.dtype) for parameter in parameters if not parameter.is_floating_point()}):
        reasons.append(f"{', '.join(strange)} parameters are trainable: gradients must be floating-point")
    if len(devices := {str(parameter.device) for parameter in parameters}) > 1:
        reasons.append(f"the parameters are on several devices ({', '.join(sorted(devices))}): move them to one device")
    if any(parameter.is_meta for parameter in parameters):
        reasons.append("parameters are on the meta device: call to_empty() and initialize them first")
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if sharded := [name for name, item in tensors.items() if is_distributed(item)]:
        others = f" and {len(sharded) - 5} more" if len(sharded) > 5 else ""
        reasons.append(
            f"{', '.join(sharded[:5])}{others}: distributed tensors (DTensor) are not supported: each worker must hold "
            "the complete model in plain tensors.  Remove fully_shard(), parallelize_module() and distribute_tensor(), "
            "even over a mesh of one process; to shard a model, write your own training loop (docs/ring.md)"
        )
    wrappers = [
        item
        for item in model.modules()
        if _SUMMING & {kind.__name__ for kind in type(item).__mro__} and hasattr(item, "process_group")
    ]
    if several := {type(item).__name__ for item in wrappers if item.process_group.size() > 1}:
        reasons.append(
            f"the model is wrapped in {', '.join(sorted(several))} over several processes, so the workers would wait "
            "for each other in each pass, and all fail when one dies: pass the model without this wrapper"
        )
    if more := strange_parameters(optimizer, set(map(id, parameters))):
        reasons.append(
            f"the optimizer has {more} parameter(s) that are not in the model: their gradients would not be summed; "
            "put every trained parameter in the model, or in the list of models"
        )
    if twice := len(trained := _parameters(optimizer)) - len(set(map(id, trained))):
        reasons.append(f"{twice} parameter(s) are in several optimizers, which would all update them: keep each in one")
    for each in optimizer.optimizers if isinstance(optimizer, Optimizers) else [optimizer]:
        closure = inspect.signature(each.step).parameters.get("closure")
        if closure is None or closure.default is not inspect.Parameter.empty:
            continue
        reasons.append(
            f"{type(each).__name__} needs a closure, which recomputes the gradients several times in one step, but "
            "gradients are summed once per step here: use an optimizer whose step() needs no closure"
        )
    norms = [(name, item) for name, item in model.named_modules() if getattr(item, "track_running_stats", False)]
    if counting := [name for name, item in norms if item.training]:
        others = f" and {len(counting) - 5} more" if len(counting) > 5 else ""
        reasons.append(
            f"{', '.join(counting[:5])}{others}: running statistics change with each forward pass in train mode, "
            "differently on each worker: use a norm without them (GroupNorm, LayerNorm); to keep the statistics "
            "fixed, call .eval() on these layers, before ElasticDataParallel() and after each model.train()"
        )
    if taken := sorted({"model", "optimizer"} & set(state)):
        reasons.append(f"state: the names {', '.join(taken)} are reserved: use other names")
    if REPLACED_VARIABLE in os.environ and dist.is_initialized() and dist.get_world_size() > 1:
        reasons.append(
            f"torch's process group has {dist.get_world_size()} workers, and a worker that replaces a lost one cannot "
            "join it: remove init_process_group(), create a group of one process (docs/integrate.md), or leave out "
            "--max-restarts"
        )
    if reasons and COORDINATOR_VARIABLE in os.environ and not traceback_wanted():
        refuse(os.path.basename(sys.argv[0]), reasons)
    if reasons:
        raise UserError(*reasons)


_AT_IMPORT = program.describe()
"""Description of the program.  It is taken at the import of this module, since a user may edit the files later."""


def loaded_program() -> dict[str, str]:
    """Describe the program of this process; for modules that are in ``_AT_IMPORT``, use the description from there."""
    return {**program.describe(), **_AT_IMPORT}


def some_differ(own: OwnDescription, worker: int, holds: bool, statuses: Mapping[int, Json], session: Session) -> bool:
    """Return whether any worker's settings or program differ from the run's; if so, the epoch must not begin.

    If this worker differs and has no state (``holds`` is False), its process exits.  If this worker differs and has a
    state, the run ends, since this worker was launched with the run.
    """
    compared = {each: ComparedStatus.of(status, "holds", "holds", "address") for each, status in statuses.items()}
    odd = odd_ones(compared)
    different = own.different(worker, compared, odd)
    if different and not holds:
        log.info(f"worker {worker} exits, and the run continues without it: it {different}")
        sys.exit(EXIT_USAGE)
    if different:
        session.give_up(EXIT_USAGE, f"worker {worker} {different}")
    return bool(different or odd.workers)
