"""Evaluation while workers come and go: a section, whose microbatches are those of a full launch, shared out.

evaluate()                    a section: run again from the start by whoever is left
  forward_backward_func()     with ``forward_only``: this replica's microbatches of one evaluation step
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.training import get_args, training

from recover_megatron.instep.recovery import Recovery
from recover_megatron.instep.traffic import Mode
from recover_megatron.megatron_hooks import monkeypatch
from recover_megatron.megatron_hooks.data import Microbatches, source_of, sources_of
from recover_megatron.megatron_hooks.groups import Groups


class Evaluation:
    """Of one worker.  ``recovery``: None as long as the training has not begun: then evaluation is Megatron's own."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self.recovery: Recovery | None = None

    def install(self) -> None:
        """Wrap the seam; raises UserError if this Megatron's is not the one we know."""
        monkeypatch.wrap(training, "evaluate", ("forward_step_func", "data_iterator", "model"), self._evaluate)

    def _evaluate(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def evaluate(forward_step_func: Any, data_iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            if self.recovery is None:
                return original(forward_step_func, data_iterator, model, *args, **kwargs)
            megatron_args = get_args()
            consumed = megatron_args.consumed_valid_samples
            starts = [(source, source.position) for source in sources_of(data_iterator)]

            def run() -> Any:
                with self._groups.traffic.during(Mode.DEFERRED):
                    return original(forward_step_func, data_iterator, model, *args, **kwargs)

            def reset() -> None:
                megatron_args.consumed_valid_samples = consumed
                for source, position in starts:
                    source.position = position

            return self.recovery.sections.run("eval", run, reset=reset, together=True)

        return evaluate

    def forward_only(self, schedule: Callable[..., Any], call: dict[str, Any]) -> Any:
        """One evaluation step.  ``call``: the keyword arguments with which Megatron called the schedule."""
        assert self.recovery is not None
        args, mine, progress = get_args(), self.recovery.assignment, self.recovery.progress
        total = call["num_microbatches"] * args.data_parallel_size
        ids = mine.share(total)[mine.inner_rank]
        chunks = call["data_iterator"] if isinstance(call["data_iterator"], list) else [call["data_iterator"]]
        iterators: list[Any] = []
        for chunk in chunks:
            source = source_of(chunk)
            if source is not None:
                source.begin(source.position, ids, total)
                source.position += total * call["micro_batch_size"]
            iterators.append(
                None if source is None else Microbatches(source, ids, lambda: progress.storage("eval-data"))
            )
        progress.inject("eval")
        forward_step_func = call["forward_step_func"]

        def forward_step(*args: Any, **kwargs: Any) -> Any:
            progress.mark("eval")
            return forward_step_func(*args, **kwargs)

        given = iterators if isinstance(call["data_iterator"], list) else iterators[0]
        mine_only = {"forward_step_func": forward_step, "data_iterator": given, "num_microbatches": len(ids)}
        return schedule(**{**call, **mine_only})
