"""Sections for Megatron's computations over replicas between two steps: evaluation, hashes and norm of parameters.

evaluate_and_print_results()  with --full-validation: the replica's first worker sends its peers the number of steps
  evaluate()                  the launch's number of microbatches is distributed over the live replicas
    forward_backward_func()   with ``forward_only``: runs this replica's microbatches of one evaluation step

check_param_hashes_across_dp_replicas()   --check-weight-hash-across-dp-replicas-interval: compares all workers that
                                          have a place
calc_params_l2_norm()                     --log-params-norm: with the distributed optimizer each worker sums the main
                                          parameters of which it is the first live holder; before model parameters are
                                          summed, the worker waits until they are gathered
                                          (--overlap-param-gather)

If a worker is lost, the survivors repeat the section from the start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.training import get_args

from recover_megatron.instep.manager import Manager, View
from recover_megatron.integrate import Loop
from recover_megatron.megatron_hooks import monkeypatch
from recover_megatron.megatron_hooks.data.source import of_ids, sources_of
from recover_megatron.megatron_hooks.gradients.microbatches import grouped
from recover_megatron.megatron_hooks.optimizer.sharded_optimizer import ShardedOptimizer
from recover_megatron.megatron_hooks.parallel_groups import Groups


class Evaluation:
    """Hooks of one worker for evaluations, and for hashes and norms of parameters.

    ``sharded``: function that returns the distributed optimizer; None if the optimizer's state is not sharded.
    """

    def __init__(
        self, groups: Groups, sharded: Callable[[], ShardedOptimizer | None], manager: Callable[[], Manager | None]
    ) -> None:
        """``manager``: function that returns None before training begins; Megatron then evaluates without recovery."""
        self._groups, self._sharded, self._manager = groups, sharded, manager

    def install(self, loop: Loop) -> None:
        """Wrap the seams of ``loop``; raises UserError if their signatures are unknown."""
        loop.wrap("evaluate", self._evaluate)
        loop.wrap("evaluations", self._with_results)
        loop.wrap("weight_hashes", self._hashes)
        loop.wrap("parameters_norm", self._norm)

    def _with_results(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def evaluate_and_print_results(*args: Any, **kwargs: Any) -> Any:
            megatron_args = get_args()
            if self._manager() is None or not getattr(megatron_args, "full_validation", False):
                return original(*args, **kwargs)
            megatron_args.eval_iters = _steps(megatron_args)
            # Otherwise Megatron would broadcast the number of steps from rank 0, which may die before all receive it.
            with monkeypatch.replaced(megatron_args, full_validation=False):
                return original(*args, **kwargs)

        return evaluate_and_print_results

    def _evaluate(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def evaluate(forward_step_func: Any, data_iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            if (manager := self._manager()) is None:
                return original(forward_step_func, data_iterator, model, *args, **kwargs)
            megatron_args = get_args()
            consumed = megatron_args.consumed_valid_samples
            starts = [(source, source.position) for source in sources_of(data_iterator)]

            def run() -> Any:
                with self._groups.deferring():
                    return original(forward_step_func, data_iterator, model, *args, **kwargs)

            def reset() -> None:
                megatron_args.consumed_valid_samples = consumed
                for source, position in starts:
                    source.position = position

            return manager.section("eval", run, reset=reset, together=True)

        return evaluate

    @staticmethod
    def forward_only(manager: Manager, schedule: Callable[..., Any], call: dict[str, Any]) -> Any:
        """Run one evaluation step.  ``call``: the keyword arguments with which Megatron called the schedule."""
        args, view = get_args(), manager.view
        total = call["num_microbatches"] * args.data_parallel_size
        share = view.share(total)[view.inner_rank]
        ids = share or _borrowed(view, total)
        for source in sources_of(call["data_iterator"]):
            source.begin(source.position, ids, total)
            source.position += total * source.size
        manager.inject("eval")
        forward_step_func = call["forward_step_func"]

        def forward_step(*args: Any, **kwargs: Any) -> Any:
            manager.mark("eval")
            return forward_step_func(*args, **kwargs)

        given = of_ids(call["data_iterator"], ids, lambda: manager.waiting("eval-data", storage=True))
        own_only = {"forward_step_func": forward_step, "data_iterator": given, "num_microbatches": len(ids)}
        with grouped(call["model"], len(ids)):
            found = schedule(**{**call, **own_only})
        if call.get("collect_non_loss_data"):
            return found
        found = [{key: _with_count(value) for key, value in losses.items()} for losses in found]
        return found if share else _counting_nothing(found, args)

    def _hashes(self, original: Callable[..., bool]) -> Callable[..., bool]:
        def check_param_hashes_across_dp_replicas(model: list[Any], cross_check: bool = False) -> bool:
            if self._groups.apart:
                return True  # a joining worker's digest has already been compared, and the other workers are in a step
            return bool(self._section("weight hashes", lambda: original(model, cross_check)))

        return check_param_hashes_across_dp_replicas

    def _norm(self, original: Callable[..., float]) -> Callable[..., float]:
        def calc_params_l2_norm(model: Any, *args: Any, **kwargs: Any) -> float:
            sharded = self._sharded()
            if sharded is not None and _reads_model(model):
                sharded.complete()

            def run() -> float:
                with main_parameters({} if sharded is None else spoken_for(sharded)):
                    return original(model, *args, **kwargs)

            with nullcontext() if sharded is None else sharded.saving(moments=False):
                return float(self._section("parameters' norm", run))

        return calc_params_l2_norm

    def _section(self, kind: str, run: Callable[[], Any]) -> Any:
        manager = self._manager()
        if manager is None or not self._groups.is_open:
            return run()

        def inside() -> Any:
            manager.mark(kind, waiting=True)
            with self._groups.in_section():
                return run()

        return manager.section(kind, inside)


def _borrowed(view: View, total: int) -> list[int]:
    """Return microbatches of other replicas for a replica whose share of the evaluation is empty.

    A share can be empty if replicas were added to the run.  All replicas must sum the same losses, and a replica learns
    which losses exist only from a forward pass.
    """
    return list(range(total))[view.inner_rank : view.quotas.least : view.quotas.granularity]


def _with_count(loss: torch.Tensor) -> torch.Tensor:
    """Return a microbatch's ``loss`` as a tensor (sum, count); a single number, which is a mean, becomes (mean, 1).

    Megatron then adds sums and counts over all replicas.  From means alone, Megatron would compute a wrong average,
    because workers may have run different numbers of microbatches.
    """
    return loss if loss.numel() != 1 else torch.stack([loss.view([]), torch.ones_like(loss).view([])])


def _counting_nothing(losses: list[Any], args: Any) -> list[Any]:
    """Return zero losses in place of ``losses``, for microbatches that other replicas count, so that none counts twice.

    With --sft ``losses`` are returned unchanged, because Megatron averages the means of all replicas.  They then count
    as one more sample.
    """
    if getattr(args, "sft", False):
        return losses
    return [{key: torch.zeros_like(value) for key, value in one.items()} for one in losses]


def _steps(args: Any) -> Any:
    """Return the number of steps of an evaluation with --full-validation: an int, or a list if there are several sets.

    The replica's first worker broadcasts the numbers inside the replica, because most tensor ranks and the middle
    stages have no data from whose size they could compute the numbers.
    """
    several = bool(getattr(args, "multiple_validation_sets", False))
    given = args.eval_iters if isinstance(args.eval_iters, list) else [args.eval_iters]
    steps = torch.tensor([each or 0 for each in given], dtype=torch.long, device="cuda")
    group, first = parallel_state.get_model_parallel_group(), parallel_state.get_model_parallel_src_rank()
    torch.distributed.broadcast(steps, first, group=group)
    return steps.tolist() if several else int(steps[0])


def _reads_model(model: Any) -> bool:
    """Return whether Megatron's norm reads any model parameter.  For bf16 parameters it reads main parameters instead.

    If True, the caller must first wait until updated parameters have arrived, which may take until the next forward
    pass.
    """
    chunks = model if isinstance(model, list) else [model]
    return not get_args().bf16 or any(one.dtype == torch.float32 for chunk in chunks for one in chunk.parameters())


def spoken_for(sharded: ShardedOptimizer) -> dict[torch.nn.Parameter, list[torch.Tensor]]:
    """Return a map: 16-bit parameter -> parts of its main parameter of which this worker is the primary holder."""
    found: dict[torch.nn.Parameter, list[torch.Tensor]] = {}
    for held, primary in sharded.primaries():
        found.update({parameter: [] for parameter in held.parameters if parameter.dtype != torch.float32})
        for fragment in sorted(primary, key=lambda one: (one.bucket, one.start)):
            if (parts := found.get(held.parameter_of(fragment))) is not None:
                parts.append(fragment.tensor.detach())
    return found


@contextmanager
def main_parameters(parts: Mapping[torch.nn.Parameter, list[torch.Tensor]]) -> Iterator[None]:
    """Context in which ``main_param`` of each parameter is its concatenated ``parts``, or None if it has no parts.

    Megatron reads this worker's shard from ``main_param``.  Megatron sets this attribute only when it creates the
    optimizer, but a loss changes which worker holds which shard.
    """
    names = ("main_param", "main_param_sharded")
    before = {one: [(name, getattr(one, name)) for name in names if hasattr(one, name)] for one in parts}
    try:
        for one, held in parts.items():
            one.main_param = torch.cat([part.to(one.device).view(-1) for part in held]) if held else None
            one.main_param_sharded = True
        yield
    finally:
        for one, attributes in before.items():
            for name in names:
                vars(one).pop(name, None)
            vars(one).update(attributes)
