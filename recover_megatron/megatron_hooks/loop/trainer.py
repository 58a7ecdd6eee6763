"""``Trainer`` for ``instep.step`` that runs Megatron's own schedule.

    compute(ids)   run Megatron's schedule on the microbatches ``ids``, with their random numbers.  The schedule's last
                   call, finalize_model_grads, is postponed: only the call's arguments are saved
    extras()       return [token count | router counts | sums of `trackers` | largest attention logits | FP8 scales |
                   per logged loss: sum, count], each over all passes of this step
    finish(...)    after the commit, call finalize_model_grads once, with the token count of the complete batch

Losses are divided by the launch's number of microbatches, even if this replica runs another number: ``NominalCount``
passes the launch's number to ``forward_step_calc_loss``, which the schedules call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.pipeline_parallel.utils import AbstractSchedulePlan
from megatron.core.utils import get_model_config

from recover_megatron.instep.manager import Manager
from recover_megatron.instep.trainer import Gradients
from recover_megatron.megatron_hooks import monkeypatch
from recover_megatron.megatron_hooks.data.source import of_ids
from recover_megatron.megatron_hooks.gradients.microbatches import (
    Accumulated,
    MicrobatchSeeds,
    grouped,
    has_gradient,
    whole_pass,
)
from recover_megatron.megatron_hooks.loop.training_parts import TrainingParts


@dataclass(eq=False)
class NominalCount:
    """Replacement for the number of microbatches by which Megatron divides each loss, while ``count`` is not None."""

    count: int | None = None

    def install(self) -> None:
        monkeypatch.wrap("forward_step_calc_loss", self._wrap)

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        place = 6

        def forward_step_calc_loss(*args: Any, **kwargs: Any) -> Any:
            if self.count is not None:
                if len(args) > place:
                    args = (*args[:place], self.count, *args[place + 1 :])
                else:
                    kwargs["num_microbatches"] = self.count
            return original(*args, **kwargs)

        return forward_step_calc_loss


@dataclass(eq=False)
class MegatronTrainer:
    _schedule: Callable[..., Any]
    _call: dict[str, Any]
    """The keyword arguments with which Megatron called the schedule."""
    _parts: TrainingParts
    _manager: Manager
    _seeds: MicrobatchSeeds
    _accumulated: Accumulated
    _iteration: int
    _losses: list[dict[str, torch.Tensor]] = field(default_factory=list, init=False)
    _tokens: int = field(default=0, init=False)
    _finalize_call: dict[str, Any] = field(default_factory=dict, init=False)

    @property
    def _model(self) -> list[Any]:
        model = self._call["model"]
        return model if isinstance(model, list) else [model]

    @property
    def gradients(self) -> Gradients:
        return self._parts.buckets.gradients

    def compute(self, ids: Sequence[int], *, again: bool) -> None:
        self._parts.buckets.new_pass(again=again)
        before = self._accumulated.counts(self._model)
        backward = [0 for _ in self._model]
        with self._finalize_held(), grouped(self._call["model"], len(ids)), whole_pass(self._model):
            losses = self._schedule(
                **{
                    **self._call,
                    "forward_step_func": self._forward_step(ids, backward),
                    "data_iterator": of_ids(
                        self._call["data_iterator"], ids, lambda: self._manager.waiting("data", storage=True)
                    ),
                    "num_microbatches": len(ids),
                }
            )
        self._accumulated.check(self._model, before, backward)
        self._parts.logits.ran(ids)
        self._parts.scales.ran(ids)
        self._losses += losses or []
        # Without this wait, the step would wait for the device when it reads the losses.  Here the wait counts as
        # compute time, both for hang detection and in the seconds per microbatch that --recover-balance uses.
        self._parts.wait_for_device()

    def finish_pass(self) -> None:
        buckets = self._parts.buckets
        if buckets.overlap is not None:
            buckets.overlap.complete_all()  # required before the next update, even if this worker ran no microbatch
        buckets.finish_pass()

    def extras(self) -> torch.Tensor:
        """Return the values that the step's tail sums (see the module's docstring): float64, flat, on the host.

        Only the last stage has losses.
        """
        losses: list[float] = []
        for key in self._losses[0] if self._losses else ():
            values = torch.stack([loss[key].detach().double().view(-1) for loss in self._losses])
            sums = values.sum(dim=0).tolist()
            # One number is a mean over a microbatch.  Two numbers are a sum over tokens, and the number of tokens.
            losses += sums if len(sums) == 2 else [sums[0], float(len(values))]
        tokens, double = float(self._tokens), torch.float64
        counted = [one.read() for one in self._parts.beside]
        return torch.cat([torch.tensor([tokens], dtype=double), *counted, torch.tensor(losses, dtype=double)])

    def finish(self, extras: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        """Call finalize_model_grads, and return the complete batch's losses, in the form that a schedule returns.

        ``extras``: the sum over the complete batch of the values that ``extras()`` returns.
        """
        parts = self._parts
        sizes = [1, *(one.size for one in parts.beside)]
        tokens, routers, trackers, logits, scales, losses = extras.split([*sizes, len(extras) - sum(sizes)])
        config = get_model_config(self._model[0])
        call = dict(self._finalize_call)
        if not call:  # no call was saved: this worker ran no microbatch
            none = torch.zeros([], dtype=torch.int, device=torch.cuda.current_device())
            call = {"model": self._model, "num_tokens": none if config.calculate_per_token_loss else None}
        if call.get("num_tokens") is not None:
            call["num_tokens"] = torch.full_like(call["num_tokens"], round(float(tokens)))
        parts.routers.write(routers)
        parts.buckets.committed = True
        try:
            config.finalize_model_grads_func(**call)
        finally:
            parts.buckets.committed = False
        parts.trackers.write(trackers)
        parts.logits.write(logits)
        parts.scales.write(scales)
        names = parts.state.totals.names
        if self._losses:
            names[:] = self._losses[0]
        whole = {}
        # A pipeline layout may have chunks without layers, and so without parameters.
        device = next((weight.device for chunk in self._model for weight in chunk.parameters()), None)
        for number, key in enumerate(names):  # also if this worker ran no microbatch, but earlier steps had losses
            total, count = losses[2 * number], losses[2 * number + 1]
            pair = bool(self._losses) and self._losses[0][key].numel() == 2
            value = torch.stack([total, count]) if pair else (total / count).view(1)
            whole[key] = value.to(device=device, dtype=torch.float32)
        return [whole] if whole else []

    # ---- inside ``compute``

    def _forward_step(self, ids: Sequence[int], backward: list[int]) -> Callable[..., Any]:
        """Return the user's forward step, wrapped so that the k-th call on a model chunk runs microbatch ``ids[k]``.

        The wrapper adds 1 to ``backward[chunk]`` for each microbatch that will have a backward pass on that chunk.
        """
        original = self._call["forward_step_func"]
        # Megatron passes a chunk or, to build a schedule plan, the module inside the chunk's wrappers.
        chunks = {id(one): number for number, chunk in enumerate(self._model) for one in _wrapped(chunk)}
        calls = [0 for _ in self._model]

        def forward_step(data_iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            chunk = chunks[id(model)]
            j = ids[calls[chunk]]
            calls[chunk] += 1
            self._manager.mark("forward", microbatch=j)
            self._manager.inject("forward")
            self._seeds.seed(self._iteration, j, chunk)
            parts = self._parts
            parts.logits.begin_pass(chunk, j)
            with parts.scales.microbatch(chunk, j):
                output, loss_func = original(data_iterator, model, *args, **kwargs)
            if not isinstance(output, AbstractSchedulePlan):
                parts.logits.end_pass()
            parts.scales.watch(chunk, j, output)
            backward[chunk] += has_gradient(output)
            return output, loss_func

        return forward_step

    @contextmanager
    def _finalize_held(self) -> Iterator[None]:
        config = get_model_config(self._model[0])
        original = config.finalize_model_grads_func

        def hold(model: Any, num_tokens: torch.Tensor | None = None, pg_collection: Any = None, **kwargs: Any) -> None:
            self._finalize_call = {"model": model, "num_tokens": num_tokens, **kwargs}
            if pg_collection is not None:
                self._finalize_call["pg_collection"] = pg_collection
            if num_tokens is not None:
                self._tokens += int(num_tokens)

        config.finalize_model_grads_func = hold
        try:
            yield
        finally:
            config.finalize_model_grads_func = original


def _wrapped(chunk: Any) -> Iterator[Any]:
    """Yield a model chunk, then the module inside each of its wrappers."""
    while chunk is not None:
        yield chunk
        chunk = getattr(chunk, "module", None)
