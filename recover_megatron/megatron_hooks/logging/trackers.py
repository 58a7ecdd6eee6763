"""Sums over a step's microbatches that Megatron's layers accumulate, in addition to the returned losses.

    ``Trackers``          MoE: load balancing losses, z-loss; per layer
                          MTP: loss, numbers of correct and of all predictions; per depth of multi-token prediction
                          DSA: loss of the sparse attention's indexer; per layer
                          THD: tokens of packed sequences, and squared sequence lengths, to count operations
    ``RouterSums``        --moe-router-enable-expert-bias: tokens per expert
                          --moe-router-load-balancing-type quantile_balancing: quantiles, and their microbatch counts

Each worker has sums over the microbatches that it ran, and Megatron adds or averages these sums over the workers.
After a death the result would be wrong: the sums of dead workers are missing, and survivors ran more than their share.
So the step's tail adds the sums of all workers (``read``), counting every microbatch once.  After the commit each
worker stores the sums of the complete batch (``write``).  Megatron's own operations over replicas, if any, are skipped
(``parallel_groups.KNOWN``).  For maxima over the microbatches see `maxima`.

``LogTotals`` has the sums since the last row of Megatron's log, which are part of a worker's state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.training import get_timers, training

from recover_megatron.integrate import Loop
from recover_megatron.workload.grid import LaunchGrid

BALANCING = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""Value of Megatron's --moe-router-load-balancing-type -> name of this loss in Megatron's log."""


@dataclass(frozen=True)
class _Sums:
    """Sums of one kind.

    ``size``: number of elements.  ``find``: function that returns the tensor that accumulates the sums, or None before
    the tensor exists.
    """

    size: int
    find: Callable[[], torch.Tensor | None]
    added: bool = False
    """True if Megatron adds the sums of all workers, False if it averages them."""


class Trackers:
    """Sums that Megatron logs for one step.

    ``args``: Megatron's arguments.  ``tail``: the slots over which a step's tail sums, including slots of replicas that
    may be added later.
    """

    def __init__(self, args: Any, tail: Sequence[int], grid: LaunchGrid) -> None:
        self._ranks = sum(slot < grid.world for slot in tail)
        self._experts = _names_of_experts(args)
        self._layers = args.num_layers + (getattr(args, "mtp_num_layers", None) or 0)
        experts = [_Sums(self._layers, _expert_sums(name)) for name in self._experts]
        packing = _Sums(2, lambda: getattr(training, "_seqlen_stats_in_iteration", None), added=True)
        self._every = [*experts, *_of_prediction(args), *_of_indexer(args), packing]

    @property
    def size(self) -> int:
        """Number of elements that ``read`` returns.  It is constant, and equal on all workers."""
        return sum(sums.size for sums in self._every)

    def begin(self) -> None:
        """Zero the sums at the start of a step; a step that this worker did not finish may have left values."""
        for sums in self._every:
            if (tensor := sums.find()) is not None:
                tensor.zero_()

    def read(self) -> torch.Tensor:
        """Return this worker's sums over the microbatches that it ran in this step; float64, flat, on the host."""
        parts = []
        for sums in self._every:
            tensor = sums.find()
            parts.append(torch.zeros(sums.size) if tensor is None else tensor.detach().flatten())
        return torch.cat([part.double().cpu() for part in parts]) if parts else torch.zeros(0, dtype=torch.float64)

    def write(self, whole: torch.Tensor) -> None:
        """Store the complete batch's sums in Megatron's tensors; ``whole``: the sum of ``read`` over all workers."""
        at = 0
        for sums in self._every:
            part, at = whole[at : at + sums.size], at + sums.size
            if (tensor := sums.find()) is not None:
                tensor.copy_((part if sums.added else part / self._ranks).view_as(tensor))
        prediction = MTPLossLoggingHelper.tracker
        if "avg_group" in prediction:
            prediction["avg_group"] = None
        if self._experts:
            self._stay_in_the_replica()

    def _stay_in_the_replica(self) -> None:
        """Make Megatron average the experts' values only over this replica's tensor and context ranks.

        The values of tensor ranks differ; context ranks and replicas already have equal values.
        """
        tracker = get_moe_metrics_tracker()
        for name in self._experts:
            tracker.ensure_initialized(name, self._layers)  # in a stage without experts, Megatron does this only later
            entry = tracker.metrics[name]
            entry.needs_dp_avg = False
            if entry.avg_group is not None:
                entry.avg_group = parallel_state.get_tensor_and_context_parallel_group()


def _names_of_experts(args: Any) -> list[str]:
    if not getattr(args, "num_experts", None):
        return []
    given = args.moe_router_load_balancing_type
    kinds = [given] if isinstance(given, str) else given
    names = [name for kind, name in BALANCING.items() if kind in kinds]
    return [*names, *["z_loss"] * (getattr(args, "moe_z_loss_coeff", None) is not None)]


def _expert_sums(name: str) -> Callable[[], torch.Tensor | None]:
    return lambda: getattr(get_moe_metrics_tracker().metrics.get(name), "values", None)


def _of_prediction(args: Any) -> list[_Sums]:
    depth = getattr(args, "mtp_num_layers", None) or 0
    # Megatron 0.18 names the loss "values", later releases name it "loss_values".
    names = {"loss_values": False, "values": False, "correct_values": True, "total_values": True}
    tracker = MTPLossLoggingHelper.tracker
    return [_Sums(depth, partial(tracker.get, name), added) for name, added in names.items() if depth]


def _of_indexer(args: Any) -> list[_Sums]:
    if not getattr(args, "dsa_indexer_loss_coeff", None):
        return []
    return [_Sums(args.num_layers, partial(DSAIndexerLossLoggingHelper.tracker.get, "values"))]


def install(loop: Loop, active: Callable[[], bool]) -> None:
    """Wrap Megatron's function that sums sequence lengths over all ranks, because ``Trackers`` has summed them already.

    ``active``: function that returns whether training with recovery has begun on this worker.
    """

    def not_added(original: Callable[..., Any]) -> Callable[..., Any]:
        def consume_seqlen_stats_in_iteration() -> Any:
            if not active() or not training._seqlen_stats_active:
                return original()
            whole = training._seqlen_stats_in_iteration
            # All context-parallel ranks count the same sequences, and the tail has summed over these ranks, too.
            tokens, squares = (whole / parallel_state.get_context_parallel_world_size()).tolist()
            whole.zero_()
            training._seqlen_stats_active = False
            return tokens, squares

        return consume_seqlen_stats_in_iteration

    loop.wrap("sequence_lengths", not_added)


INTERVAL = "interval-time"
"""Name of Megatron's timer that measures the seconds since the last row of Megatron's log."""
CUMULATIVE = ("cumulative_correct_values", "cumulative_total_values")
"""Values of multi-token prediction that Megatron's log counts from the start of the run."""


class LogTotals:
    """Sums and seconds since the last row of Megatron's log on one worker; part of the worker's state.

    train() keeps the sums in a local variable, which is empty when train() is entered.  So a worker that joins between
    two rows receives the sums from its column, and its next row covers the complete interval.
    """

    def __init__(self) -> None:
        self._totals: dict[str, Any] = {}
        self.names: list[str] = []
        """Names of the losses that a step logs, in the order of these losses in the step's tail."""
        self._seconds = 0.0
        """Seconds, since the last row, that Megatron's timer has not measured: train() was left in between, or another
        worker measured them."""

    def take_up(self, totals: dict[str, Any]) -> None:
        """Restore the saved sums into ``totals``, train()'s variable, before Megatron adds an iteration to them."""
        if totals is not self._totals:
            totals.update(self._totals)
            self._totals = totals
            get_timers()(INTERVAL)._elapsed += self._seconds
            self._seconds = 0.0

    def pause(self) -> None:
        """Save the measured seconds, because train() was left and the timers will be reset."""
        self._seconds += _seconds()

    def tree(self) -> dict[str, Any]:
        """Return the sums as a tree to send (``collectives.state.holder``).

        The tree contains copies, because the sums change while it is sent.
        """
        return {
            "totals": _copies(self._totals),
            "names": list(self.names),
            "seconds": self._seconds + _seconds(),
            "cumulative": _copies({k: v for k, v in MTPLossLoggingHelper.tracker.items() if k in CUMULATIVE}),
        }

    def load(self, tree: dict[str, Any]) -> None:
        """Adopt a ``tree`` received from another worker; the next iteration of train() restores its sums."""
        self.names = list(tree["names"])
        self._totals, self._seconds = _on_device(tree["totals"]), tree["seconds"] - _seconds()
        for name in CUMULATIVE:  # a state that was sent before the first count lacks these entries
            MTPLossLoggingHelper.tracker.pop(name, None)
        MTPLossLoggingHelper.tracker.update(_on_device(tree["cumulative"]))


def _seconds() -> float:
    timer = get_timers()._timers.get(INTERVAL)
    return 0.0 if timer is None else float(timer.elapsed(reset=False))


def _copies(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value.detach().clone() if isinstance(value, torch.Tensor) else value for key, value in values.items()}


def _on_device(values: dict[str, Any]) -> dict[str, Any]:
    # Cloned, because a received tensor is a view, which would keep the memory of the complete state.
    return {key: value.clone().cuda() if isinstance(value, torch.Tensor) else value for key, value in values.items()}


SUMS = ("local_tokens_per_expert", "qb_beta_accum", "qb_beta_count")
BIASES = ("expert_bias", "qb_beta")


def biases(model: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
    """Return the bias tensors of all routers, not copies of them, in a fixed order."""
    return [tensor.data for tensor in _buffers(model, BIASES)]


class RouterSums:
    """The sums of the routers on one worker, from which Megatron updates the routers' biases once per step.

    Stock Megatron adds the sums of all workers in finalize_model_grads.  With --recover each router has the total
    before that function runs.  The biases are treated like parameters: an orphan that has not completed a step restores
    the biases from before the step (`training_state`).
    """

    def __init__(self, model: Iterable[torch.nn.Module]) -> None:
        for module in (module for chunk in model for module in chunk.modules()):
            if (maintain := getattr(module, "_maintain_float32_expert_bias", None)) is not None:
                maintain()  # makes the bias float32; otherwise a state received before the first pass would be rounded
        self._every = list(_buffers(model, SUMS))
        self._types = [tensor.dtype for tensor in self._every]

    @property
    def size(self) -> int:
        """Number of elements that ``read`` returns.  It is equal on all workers of a column."""
        return sum(tensor.numel() for tensor in self._every)

    def begin(self) -> None:
        """Zero the sums at the start of a step; a step that this worker did not finish may have left values."""
        for tensor in self._every:
            # Float16Module makes the sums 16 bits wide; their rounding would depend on the replica's number of tokens.
            tensor.data = tensor.data.float() if tensor.is_floating_point() else tensor.data
            tensor.zero_()

    def read(self) -> torch.Tensor:
        """Return this worker's sums over the microbatches that it ran in this step; float64, flat, on the host."""
        parts = [tensor.detach().double().flatten() for tensor in self._every]
        return torch.cat(parts).cpu() if parts else torch.zeros(0, dtype=torch.float64)

    def write(self, whole: torch.Tensor) -> None:
        """Sum ``whole`` over the tensor ranks, which had different tokens, and store the total in the routers.

        ``whole``: the sum of ``read`` over the column.
        """
        if not self._every:
            return
        if parallel_state.get_tensor_model_parallel_world_size() > 1:
            whole = whole.to(self._every[0].device)
            torch.distributed.all_reduce(whole, group=parallel_state.get_tensor_model_parallel_group())
        at = 0
        for tensor, dtype in zip(self._every, self._types, strict=True):
            # In the original dtype, because Megatron computes the bias's update in the dtype of the sum.
            tensor.data = whole[at : at + tensor.numel()].view_as(tensor).to(device=tensor.device, dtype=dtype)
            at += tensor.numel()


def _buffers(model: Iterable[torch.nn.Module], names: Iterable[str]) -> Iterator[torch.Tensor]:
    for chunk in model:
        for module in chunk.modules():
            found = (getattr(module, name, None) for name in names)
            yield from (tensor for tensor in found if isinstance(tensor, torch.Tensor))
