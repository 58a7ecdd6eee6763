"""What Megatron adds up for its log alone, beside the losses that a forward step returns.

Over the microbatches of a step (``Trackers``):

    MoE     per layer: load balancing losses, z-loss
    MTP     per depth of multi-token prediction: loss, correct and all predictions
    DSA     per layer: loss of the sparse attention's indexer
    THD     of packed sequences: tokens, squares of their lengths, of which floating-point operations are counted

Each worker has sums over the microbatches that it ran, and Megatron's log averages or adds these over the workers.
After a death that is wrong: sums of the dead are missing, and who is left ran more than its share.  So they travel in
the step's tail, where every microbatch is counted once (``read``); when the step is committed each worker is given what
it would have if all of the launch had run equal shares of them (``write``): their average, however many it is taken
over.  What Megatron would add over the workers it is given as a whole.  Nothing is left to be asked of other replicas,
so no such operation is made for it, by all stages of a pipeline or by some.

Since the log's last row: ``LogTotals``, which go with the state of a worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.training import get_timers, training

from recover_megatron.instep.grid import LaunchGrid
from recover_megatron.integrate import Loop

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
        self._every = [*experts, *_of_prediction(args), *_of_indexer(args), *_of_packing()]

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
    return [_Sums(depth, _held(MTPLossLoggingHelper.tracker, name), added) for name, added in names.items() if depth]


def _of_indexer(args: Any) -> list[_Sums]:
    if not getattr(args, "dsa_indexer_loss_coeff", None):
        return []
    return [_Sums(args.num_layers, _held(DSAIndexerLossLoggingHelper.tracker, "values"))]


def _held(tracker: dict[str, Any], name: str) -> Callable[[], torch.Tensor | None]:
    return lambda: tracker.get(name)


def _of_packing() -> list[_Sums]:
    return [_Sums(2, lambda: getattr(training, "_seqlen_stats_in_iteration", None), added=True)]


class TrackerSeam:
    """Where Megatron adds up what ``Trackers`` has added up already, once steps are ours: when it is ``active``."""

    def __init__(self) -> None:
        self.active = False

    def install(self, loop: Loop) -> None:
        """Wrap the seam, where this loop has it."""
        loop.wrap("sequence_lengths", self._not_added)

    def _not_added(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def consume_seqlen_stats_in_iteration() -> Any:
            if not self.active or not training._seqlen_stats_active:
                return original()
            whole = training._seqlen_stats_in_iteration
            # The tail sums over context-parallel ranks, too, which have counted the same.
            tokens, squares = (whole / parallel_state.get_context_parallel_world_size()).tolist()
            whole.zero_()
            training._seqlen_stats_active = False
            return tokens, squares

        return consume_seqlen_stats_in_iteration


INTERVAL = "interval-time"
"""Megatron's timer of the time since the last row."""
CUMULATIVE = ("cumulative_correct_values", "cumulative_total_values")
"""What Megatron's log of multi-token prediction counts from the start of the run."""


class LogTotals:
    """What one worker's log has added up since its last row, and over which seconds: a part of its state.

    train() keeps it in a variable of its own, which is empty when train() is entered.  A worker that comes into the
    run, or comes back, in the middle of an interval gets what its column has added up, so its row is that of the whole
    interval.
    """

    def __init__(self) -> None:
        self._totals: dict[str, Any] = {}
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
        """To be sent; see ``instep.state_holder``.  Copies: they are added to while they are sent."""
        return {
            "totals": _copies(self._totals),
            "seconds": self._seconds + _seconds(),
            "cumulative": _copies({k: v for k, v in MTPLossLoggingHelper.tracker.items() if k in CUMULATIVE}),
        }

    def load(self, tree: dict[str, Any]) -> None:
        """Become what ``tree`` says, from the next iteration of train() on."""
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
