"""What Megatron computes over replicas between two steps, while workers come and go: sections.

evaluate_and_print_results()  with --full-validation: how many steps is asked inside the replica
  evaluate()                  a section, whose microbatches are those of a full launch, shared out
    forward_backward_func()   with ``forward_only``: this replica's microbatches of one evaluation step

check_param_hashes_across_dp_replicas()   --check-weight-hash-across-dp-replicas-interval: among those who have a place
calc_params_l2_norm()                     --log-params-norm: with the distributed optimizer each worker adds up the
                                          main parameters for which it speaks, owned or as a shadow of somebody lost;
                                          the model's own ones when all of them have come (--overlap-param-gather)

A section is run again from the start by those who are left when a worker is lost.
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
from recover_megatron.megatron_hooks.groups import Groups
from recover_megatron.megatron_hooks.optimizer.sharded_optimizer import ShardedOptimizer


class Evaluation:
    """The evaluations of one worker, and its part in what is computed from all parameters.

    ``sharded``: the distributed optimizer, where there is one.
    """

    def __init__(
        self, groups: Groups, sharded: Callable[[], ShardedOptimizer | None], manager: Callable[[], Manager | None]
    ) -> None:
        """``manager``: None as long as the training has not begun; an evaluation is then Megatron's own."""
        self._groups, self._sharded, self._manager = groups, sharded, manager

    def install(self, loop: Loop) -> None:
        """Wrap the seams; raises UserError if the loop's are not the ones we know."""
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
            # Megatron would have it from rank 0 of the world, who may be lost before all have it.
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
        """One evaluation step.  ``call``: the keyword arguments with which Megatron called the schedule."""
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
        mine_only = {"forward_step_func": forward_step, "data_iterator": given, "num_microbatches": len(ids)}
        with grouped(call["model"], len(ids)):
            found = schedule(**{**call, **mine_only})
        if call.get("collect_non_loss_data"):
            return found
        found = [{key: _with_count(value) for key, value in its.items()} for its in found]
        return found if share else _counting_nothing(found, args)

    def _hashes(self, original: Callable[..., bool]) -> Callable[..., bool]:
        def check_param_hashes_across_dp_replicas(model: list[Any], cross_check: bool = False) -> bool:
            if self._groups.apart:
                return True  # on its way to a place, with a state whose digest was checked; the others are in a step
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
    """What a replica evaluates that has no share of so few microbatches (the run has grown): some of the others'.

    All sum up the same losses, and only a pass tells which those are.
    """
    return list(range(total))[view.inner_rank : view.quotas.least : view.quotas.granularity]


def _with_count(loss: torch.Tensor) -> torch.Tensor:
    """A microbatch's loss as a sum and its count, which Megatron adds up over all replicas; one number is a mean.

    Of means Megatron adds up a worker's own, which need not be as many as another's.
    """
    return loss if loss.numel() != 1 else torch.stack([loss.view([]), torch.ones_like(loss).view([])])


def _counting_nothing(losses: list[Any], args: Any) -> list[Any]:
    """The losses of microbatches that others count, such that sums over all replicas are without them.

    With --sft Megatron takes the mean of all replicas' means, whatever each has run: there they are one more sample.
    """
    if getattr(args, "sft", False):
        return losses
    return [{key: torch.zeros_like(value) for key, value in its.items()} for its in losses]


def _steps(args: Any) -> Any:
    """Steps of an evaluation with --full-validation, of one validation set or of each: from the replica's first worker.

    All workers that have data know it from the data's size; other tensor ranks and the stages between have none.
    """
    several = bool(getattr(args, "multiple_validation_sets", False))
    given = args.eval_iters if isinstance(args.eval_iters, list) else [args.eval_iters]
    steps = torch.tensor([each or 0 for each in given], dtype=torch.long, device="cuda")
    group, first = parallel_state.get_model_parallel_group(), parallel_state.get_model_parallel_src_rank()
    torch.distributed.broadcast(steps, first, group=group)
    return steps.tolist() if several else int(steps[0])


def _reads_model(model: Any) -> bool:
    """Tell if Megatron's norm reads parameters of the model itself; in bf16 it reads the main parameters instead.

    Those of the model may still be on their way: only the modules of the next forward pass wait for them.
    """
    chunks = model if isinstance(model, list) else [model]
    return not get_args().bf16 or any(its.dtype == torch.float32 for chunk in chunks for its in chunk.parameters())


def spoken_for(sharded: ShardedOptimizer) -> dict[torch.nn.Parameter, list[torch.Tensor]]:
    """Of every 16-bit parameter, the parts of its copy in 32 bits for which this worker speaks, ascending."""
    found: dict[torch.nn.Parameter, list[torch.Tensor]] = {}
    for held, primary in sharded.primaries():
        found.update({parameter: [] for parameter in held.parameters if parameter.dtype != torch.float32})
        for fragment in sorted(primary, key=lambda its: (its.bucket, its.start)):
            if (parts := found.get(held.parameter_of(fragment))) is not None:
                parts.append(fragment.tensor.detach())
    return found


@contextmanager
def main_parameters(parts: Mapping[torch.nn.Parameter, list[torch.Tensor]]) -> Iterator[None]:
    """Let each parameter's ``main_param``, this worker's shard to Megatron, be these parts of it, none for no part.

    Megatron sets it when the optimizer is made; who holds what changes with every loss.
    """
    names = ("main_param", "main_param_sharded")
    before = {its: [(name, getattr(its, name)) for name in names if hasattr(its, name)] for its in parts}
    try:
        for its, held in parts.items():
            its.main_param = torch.cat([part.to(its.device).view(-1) for part in held]) if held else None
            its.main_param_sharded = True
        yield
    finally:
        for its, attributes in before.items():
            for name in names:
                vars(its).pop(name, None)
            vars(its).update(attributes)
