"""Where in Megatron's work a fault of --recover-inject may strike: the phases of ``chaos.spec``, by their places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.pipeline_parallel import schedules

from recover_megatron.chaos.injector import Injector
from recover_megatron.megatron_hooks import monkeypatch
from recover_megatron.megatron_hooks.training import TrainingHooks

HALVES = {"add": "reduce-scatter", "finish": "reduce-scatter", "store": "all-gather"}
"""Boundaries of the ring's messages -> the phase of a fault specification."""

SECTIONS = {"eval": "eval", "checkpoint": "checkpoint", "asynchronous checkpoint": "checkpoint"}
"""Kinds of sections -> the phase of a fault specification."""


class FaultInjection:
    """The faults of one worker; ``training`` tells where it is."""

    def __init__(self, injector: Injector, training: TrainingHooks) -> None:
        self._injector = injector
        self._training = training

    def install(self) -> None:
        """Wrap the seam; raises UserError if this Megatron's is not the one we know."""
        monkeypatch.wrap(schedules, "backward_step", ("input_tensor", "output_tensor"), self._striking_backward)

    def inject(self, phase: str, iteration: int | None = None) -> None:
        """A phase was reached, of ``iteration``; None: of that under way."""
        if phase == "traffic":  # an operation inside a section: a further visit of its phase
            phase = SECTIONS.get(self._training.recovery.sections.kind, "")
        self._injector.at(phase, self._training.iteration if iteration is None else iteration)

    def in_ring(self, boundary: str, hop: int) -> None:
        """At a boundary of a message of a ring: see ``collectives.ring.executor.Hook``."""
        phase = self._training.recovery.progress.phase
        if boundary == "gather":  # with --overlap-param-gather in the next iteration already
            self.inject("param-gather", self._training.updated)
            return
        if phase in ("norm", "param-gather") or boundary not in HALVES:
            return
        self.inject(HALVES[boundary])
        if boundary == "store" and self._training.sharded:
            self.inject("shadow")

    def _striking_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward_step(*args: Any, **kwargs: Any) -> Any:
            self.inject("backward")
            return original(*args, **kwargs)

        return backward_step
