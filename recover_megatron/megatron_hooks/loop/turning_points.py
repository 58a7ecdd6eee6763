"""Calls from in-step recovery into Megatron's hooks (``instep.hooks.Hooks``), and fault injection for tests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import megatron.core
import torch
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.training import get_args

from recover_megatron import __version__
from recover_megatron.chaos.spec import Injector
from recover_megatron.instep.decision import Checkpoint, Decision
from recover_megatron.instep.manager import EpochGroups, Hooks
from recover_megatron.megatron_hooks import monkeypatch
from recover_megatron.megatron_hooks.logging.records import Records
from recover_megatron.megatron_hooks.loop.training import TrainingHooks
from recover_megatron.megatron_hooks.parallel_groups import Groups

HALVES = {"add": "reduce-scatter", "finish": "reduce-scatter", "store": "all-gather"}
"""Name of a point inside a collective operation -> phase in a fault specification (--recover-inject)."""

SECTIONS = {"eval": "eval", "checkpoint": "checkpoint", "asynchronous checkpoint": "checkpoint"}
"""Kind of a section -> phase in a fault specification (--recover-inject)."""


@dataclass(eq=False)
class FaultInjection:
    """Injects the faults of one worker (--recover-inject) when Megatron's work reaches a phase of ``chaos.spec``."""

    _injector: Injector
    _training: TrainingHooks
    """Source of the current iteration and phase."""

    def install(self) -> None:
        """Wrap Megatron's functions of the backward pass; raises UserError if their signatures are unknown."""
        monkeypatch.wrap("backward_step", self._striking_backward)
        monkeypatch.wrap("TransformerModelChunkSchedulePlan.run", self._striking_backward_beside)

    def inject(self, phase: str, iteration: int | None = None) -> None:
        """Inject the faults that are due at ``phase`` of ``iteration``, by default of the current iteration."""
        if phase == "traffic":  # an operation inside a section counts as the section's phase
            phase = SECTIONS.get(self._training.manager.view.section, "")
        self._injector.at(phase, self._training.iteration if iteration is None else iteration)

    def in_collective(self, boundary: str, hop: int) -> None:
        """Inject the faults that are due at point ``boundary`` of a collective (``collectives.progress.Hook``)."""
        phase, sharded = self._training.manager.view.phase, self._training.sharded
        if boundary == "gather":  # with --overlap-param-gather the next iteration has already begun
            self.inject("param-gather", 0 if sharded is None else sharded.updated)
            return
        if phase in ("norm", "param-gather") or boundary not in HALVES:
            return
        self.inject(HALVES[boundary])
        if boundary == "store" and sharded is not None:
            self.inject("shadow")

    def _striking_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward_step(*args: Any, **kwargs: Any) -> Any:
            self.inject("backward")
            return original(*args, **kwargs)

        return backward_step

    def _striking_backward_beside(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(forward: Any, backward: Any, *args: Any, **kwargs: Any) -> Any:
            if backward is not None:
                self.inject("backward")
            return original(forward, backward, *args, **kwargs)

        return run


@dataclass(eq=False)
class TurningPoints(Hooks):
    """``Hooks`` of one worker that trains with Megatron; ``Hooks`` documents the methods."""

    _groups: Groups
    _training: TrainingHooks
    _records: Records
    _faults: FaultInjection | None
    """Fault injection of this worker; None without --recover-inject."""
    _first_plan: bool
    """True on a worker of the launch until it receives its first plan; it then logs the event "start"."""

    def abort_replica(self, all_heard: Callable[[], None]) -> None:
        self._training.step_guard.seal()
        self._groups.inside.end(all_heard)

    def planned(self, decision: Decision) -> None:
        self._groups.planned(decision)
        self._training.planned()
        self._records.planned(self._training.manager)
        self._training.console.planned(self._training.manager, get_args().curr_iteration + 1)
        if self._first_plan:
            self._first_plan = False
            self._log_start(decision)

    def _log_start(self, decision: Decision) -> None:
        args = get_args()
        shape = {
            "tp": args.tensor_model_parallel_size,
            "pp": args.pipeline_model_parallel_size,
            "cp": args.context_parallel_size,
            "ep": getattr(args, "expert_model_parallel_size", 1) or 1,
        }
        self.log(
            "start",
            world=self._training.manager.view.grid.world,
            shape=shape,
            replicas=list(decision.replicas),
            microbatches=_microbatches(),
            train_iters=args.train_iters,
            flops_per_sample=self._training.loop.services.operations(1),
            tokens_per_sample=args.seq_length,
            argv=sys.argv[1:],
            bits=16 if any(getattr(args, name, None) for name in ("bf16", "fp16", "fp8", "fp4")) else 32,
            versions={
                "recover_megatron": __version__,
                "megatron": megatron.core.__version__,
                "torch": torch.__version__,
            },
        )

    def last_checkpoint(self) -> str:
        return self._records.last_checkpoint()

    def inject(self, phase: str, iteration: int | None = None) -> None:
        if self._faults is not None:
            self._faults.inject(phase, iteration)

    def describe(self, decision: Decision) -> dict[str, Any]:
        view = self._training.manager.view
        counts = view.quotas.counts(decision, _microbatches())
        return {
            "quotas": {str(replica): count for replica, count in counts.items()},
            "phase": view.phase,
        }

    def log(self, event: str, **fields: Any) -> None:
        self._records.log(self._training.manager, event, **fields)

    def version(self) -> int | None:
        state = self._training.state
        return None if state is None else state.version

    def digest(self) -> str:
        state = self._training.state
        return "" if state is None else state.digest()

    def state_of(self) -> int:
        state = self._training.state
        return 0 if state is None else state.timeline

    def last_step(self) -> tuple[int, int]:
        state = self._training.state
        return (0, 0) if state is None else state.last_step

    def checkpoints(self) -> tuple[Sequence[Checkpoint], Collection[int]]:
        return self._training.kept_checkpoints()

    def mirror(self, decision: Decision, epoch_groups: EpochGroups) -> dict[str, Any]:
        return self._training.parts.places.mirror(decision, epoch_groups)

    def iteration(self) -> int:
        return self._training.iteration


def _microbatches() -> int:
    return get_num_microbatches() * get_args().data_parallel_size
