"""What layers and Megatron's log add up over the microbatches of a step, beside the losses that a forward step returns.

    ``Trackers``          MoE: load balancing losses, z-loss; per layer
                          MTP: loss, correct and all predictions; per depth of multi-token prediction
                          DSA: loss of the sparse attention's indexer; per layer
                          THD: tokens of packed sequences, squares of their lengths, by which operations are counted
    ``RouterSums``        --moe-router-enable-expert-bias: tokens per expert
                          --moe-router-load-balancing-type quantile_balancing: quantiles, and of how many microbatches

Each worker has sums over the microbatches that it ran, and Megatron adds or averages these over the workers.  After a
death that is wrong: sums of the dead are missing, and who is left ran more than its share.  So they travel in the
step's tail, where every microbatch is counted once (``read``); when the step is committed each worker is given what it
would have of the whole batch (``write``).  Nothing is left to be asked of other replicas: no such operation is made, or
it is known to be done already (``groups.KNOWN``).  What is a maximum over the microbatches, and no sum: `maxima`.

Since the log's last row: ``LogTotals``, which go with the state of a worker.
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
"""Megatron's --moe-router-load-balancing-type -> name in its log."""


@dataclass(frozen=True)
class _Sums:
    """Some numbers of one kind.  ``find``: the tensor that they are added up in; None as long as there is none."""

    size: int
    find: Callable[[], torch.Tensor | None]
    added: bool = False
    """Whether Megatron adds them over the workers, and does not take their average."""


class Trackers:
    """Numbers of the log.  ``args``: Megatron's; ``tail``: the slots that the tail sums over, those with them that the
    run may grow to."""

    def __init__(self, args: Any, tail: Sequence[int], grid: LaunchGrid) -> None:
        self._ranks = sum(slot < grid.world for slot in tail)
        self._experts = _names_of_experts(args)
        self._layers = args.num_layers + (getattr(args, "mtp_num_layers", None) or 0)
        experts = [_Sums(self._layers, _expert_sums(name)) for name in self._experts]
        packing = _Sums(2, lambda: getattr(training, "_seqlen_stats_in_iteration", None), added=True)
        self._every = [*experts, *_of_prediction(args), *_of_indexer(args), packing]

    @property
    def size(self) -> int:
        """How many numbers ``read`` gives; the same on all workers, from the start."""
        return sum(sums.size for sums in self._every)

    def begin(self) -> None:
        """A step begins: what was left of one that this worker did not finish is dropped."""
        for sums in self._every:
            if (tensor := sums.find()) is not None:
                tensor.zero_()

    def read(self) -> torch.Tensor:
        """What this worker's microbatches of the step have added up; float64, flat, on the host."""
        parts = []
        for sums in self._every:
            tensor = sums.find()
            parts.append(torch.zeros(sums.size) if tensor is None else tensor.detach().flatten())
        return torch.cat([part.double().cpu() for part in parts]) if parts else torch.zeros(0, dtype=torch.float64)

    def write(self, whole: torch.Tensor) -> None:
        """``whole``: the sum of what all have read, of the whole batch."""
        at = 0
        for sums in self._every:
            its, at = whole[at : at + sums.size], at + sums.size
            if (tensor := sums.find()) is not None:
                tensor.copy_((its if sums.added else its / self._ranks).view_as(tensor))
        prediction = MTPLossLoggingHelper.tracker
        if "avg_group" in prediction:
            prediction["avg_group"] = None
        if self._experts:
            self._stay_in_the_replica()

    def _stay_in_the_replica(self) -> None:
        """Let the numbers of the experts be averaged over this replica's tensor ranks alone, which differ."""
        tracker = get_moe_metrics_tracker()
        for name in self._experts:
            tracker.ensure_initialized(name, self._layers)  # as Megatron does later in a stage that has no experts
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
    names = {"loss_values": False, "values": False, "correct_values": True, "total_values": True}  # "values": 0.18
    tracker = MTPLossLoggingHelper.tracker
    return [_Sums(depth, partial(tracker.get, name), added) for name, added in names.items() if depth]


def _of_indexer(args: Any) -> list[_Sums]:
    if not getattr(args, "dsa_indexer_loss_coeff", None):
        return []
    return [_Sums(args.num_layers, partial(DSAIndexerLossLoggingHelper.tracker.get, "values"))]


def install(loop: Loop, active: Callable[[], bool]) -> None:
    """Wrap the seam where Megatron adds up what ``Trackers`` has added up.  ``active``: whether steps are ours yet."""

    def not_added(original: Callable[..., Any]) -> Callable[..., Any]:
        def consume_seqlen_stats_in_iteration() -> Any:
            if not active() or not training._seqlen_stats_active:
                return original()
            whole = training._seqlen_stats_in_iteration
            # The tail sums over context-parallel ranks, too, which have counted the same.
            tokens, squares = (whole / parallel_state.get_context_parallel_world_size()).tolist()
            whole.zero_()
            training._seqlen_stats_active = False
            return tokens, squares

        return consume_seqlen_stats_in_iteration

    loop.wrap("sequence_lengths", not_added)


INTERVAL = "interval-time"
"""Megatron's timer of the time since the last row."""
CUMULATIVE = ("cumulative_correct_values", "cumulative_total_values")
"""What Megatron's log of multi-token prediction counts from the start of the run."""


class LogTotals:
    """What one worker's log has added up since its last row, and over which seconds: a part of its state.

    train() keeps it in a variable of its own, which is empty when train() is entered: a worker that comes in the middle
    of an interval gets what its column has added up, so its row is that of the whole interval.
    """

    def __init__(self) -> None:
        self._totals: dict[str, Any] = {}
        self.names: list[str] = []
        """Of the losses that a step logs, in their order in its tail."""
        self._seconds = 0.0
        """Of the interval, those that its timer does not know of."""

    def take_up(self, totals: dict[str, Any]) -> None:
        """``totals``: train()'s variable, before an iteration is added to it."""
        if totals is not self._totals:
            totals.update(self._totals)
            self._totals = totals
            get_timers()(INTERVAL)._elapsed += self._seconds
            self._seconds = 0.0

    def pause(self) -> None:
        """The timers are about to be reset: train() was left."""
        self._seconds += _seconds()

    def tree(self) -> dict[str, Any]:
        """To be sent; see ``collectives.state.holder``.  Copies: they are added to while they are sent."""
        return {
            "totals": _copies(self._totals),
            "names": list(self.names),
            "seconds": self._seconds + _seconds(),
            "cumulative": _copies({k: v for k, v in MTPLossLoggingHelper.tracker.items() if k in CUMULATIVE}),
        }

    def load(self, tree: dict[str, Any]) -> None:
        """Become what ``tree`` says, from the next iteration of train() on."""
        self.names = list(tree["names"])
        self._totals, self._seconds = _on_device(tree["totals"]), tree["seconds"] - _seconds()
        for name in CUMULATIVE:  # those of a state before the first count are none
            MTPLossLoggingHelper.tracker.pop(name, None)
        MTPLossLoggingHelper.tracker.update(_on_device(tree["cumulative"]))


def _seconds() -> float:
    timer = get_timers()._timers.get(INTERVAL)
    return 0.0 if timer is None else float(timer.elapsed(reset=False))


def _copies(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value.detach().clone() if isinstance(value, torch.Tensor) else value for key, value in values.items()}


def _on_device(values: dict[str, Any]) -> dict[str, Any]:
    # Clones: what has arrived is a part of the memory of the whole state.
    return {key: value.clone().cuda() if isinstance(value, torch.Tensor) else value for key, value in values.items()}


SUMS = ("local_tokens_per_expert", "qb_beta_accum", "qb_beta_count")
BIASES = ("expert_bias", "qb_beta")


def biases(model: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
    """The living biases of all routers, in one order."""
    return [tensor.data for tensor in _buffers(model, BIASES)]


class RouterSums:
    """The sums of the routers of one worker's layers, by which Megatron moves their biases once a step.

    Megatron sums these over all workers in finalize_model_grads: before it runs each router is given the sum.  The
    biases go with the parameters: an orphan that has made no step takes back what they were (`state`).
    """

    def __init__(self, model: Iterable[torch.nn.Module]) -> None:
        for module in (module for chunk in model for module in chunk.modules()):
            if (maintain := getattr(module, "_maintain_float32_expert_bias", None)) is not None:
                maintain()  # as each forward pass does: a state that arrives before the first one would be rounded
        self._every = list(_buffers(model, SUMS))
        self._types = [tensor.dtype for tensor in self._every]

    @property
    def size(self) -> int:
        """How many numbers ``read`` gives: the same for all of a column."""
        return sum(tensor.numel() for tensor in self._every)

    def begin(self) -> None:
        """A step begins: what was left of one that this worker did not finish is dropped."""
        for tensor in self._every:
            # Float16Module makes them 16-bit, in which a count is rounded by how many one replica has added up.
            tensor.data = tensor.data.float() if tensor.is_floating_point() else tensor.data
            tensor.zero_()

    def read(self) -> torch.Tensor:
        """What this worker's microbatches of the step have added up; float64, flat, on the host."""
        parts = [tensor.detach().double().flatten() for tensor in self._every]
        return torch.cat(parts).cpu() if parts else torch.zeros(0, dtype=torch.float64)

    def write(self, whole: torch.Tensor) -> None:
        """``whole``: the sum of what a column has read.  Tensor ranks may have other tokens: theirs are added here."""
        if not self._every:
            return
        if parallel_state.get_tensor_model_parallel_world_size() > 1:
            whole = whole.to(self._every[0].device)
            torch.distributed.all_reduce(whole, group=parallel_state.get_tensor_model_parallel_group())
        at = 0
        for tensor, dtype in zip(self._every, self._types, strict=True):
            # By a 16-bit sum Megatron moves a bias by a step that is rounded to 16 bits, too.
            tensor.data = whole[at : at + tensor.numel()].view_as(tensor).to(device=tensor.device, dtype=dtype)
            at += tensor.numel()


def _buffers(model: Iterable[torch.nn.Module], names: Iterable[str]) -> Iterator[torch.Tensor]:
    for chunk in model:
        for module in chunk.modules():
            found = (getattr(module, name, None) for name in names)
            yield from (tensor for tensor in found if isinstance(tensor, torch.Tensor))
