"""Counters of Megatron's training loop: the position of the loop in the run.

The counters are in Megatron's arguments, its scheduler, and the positions of the evaluation's data.  The loop starts
from the counters of the launch, also on a worker that enters the loop later, and then increments them itself.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import (
    get_current_global_batch_size,
    get_current_running_global_batch_size,
    update_num_microbatches,
)
from megatron.training import get_args

from recover_megatron.megatron_hooks.checkpoint.resumed import SHUFFLED_FOR
from recover_megatron.megatron_hooks.data.source import sources_of
from recover_megatron.megatron_hooks.gradients.microbatches import to_skip, with_skipped
from recover_megatron.variables import FIRST_START_VARIABLE

CONSUMED = (
    "consumed_train_samples", "consumed_valid_samples", "skipped_train_samples", "do_valid", "do_test", "finetune",
    SHUFFLED_FOR,
)  # fmt: skip
"""Megatron's arguments for the samples consumed, for the evaluations to do, and for how the run started."""
LAUNCH = (
    "iteration", "consumed_train_samples", "skipped_train_samples", "num_floating_point_operations_so_far",
)  # fmt: skip
"""Megatron's arguments with the counters at the start of the run, from which its loop counts."""


class LoopCounters:
    """The counters of one worker.  ``validation``: Megatron's iterators, as passed to train().

    ``operations(samples)``: returns the number of floating-point operations for ``samples`` samples.
    ``running(seconds)``: see ``integrate.Services``.
    """

    def __init__(
        self,
        scheduler: Any,
        validation: Any,
        operations: Callable[[int], float],
        running: Callable[[float], float] = float,
    ) -> None:
        self._scheduler = scheduler
        self._operations = operations
        self._running = running
        if first_start := os.environ.get(FIRST_START_VARIABLE):  # the start of the run, by this host's clock
            running(time.time() - float(first_start))
        self._validation = sources_of(validation)
        self._launch = self._of_launch()
        """Counters at the start of the run, also if this worker joined it later."""

    @property
    def first(self) -> int:
        """First iteration of the run, also if this worker joined it later."""
        return with_skipped(int(self._launch["iteration"]), to_skip()) + 1

    @property
    def gone_back(self) -> bool:
        """True if the run restarted from ``first`` by a rollback; equal on all workers, whenever they joined."""
        return bool(self._launch.get("gone back"))

    def read(self, version: int | None) -> dict[str, Any]:
        """Return the present counters, for parameters that have seen ``version`` iterations."""
        args = get_args()
        return {
            "version": version,
            "args": {name: getattr(args, name) for name in CONSUMED if hasattr(args, name)},
            "launch": self._launch,
            "scheduler": self._scheduler.state_dict(),
            "validation": [source.position for source in self._validation],
            "batch": (running := get_current_running_global_batch_size()),
            "dropped": get_current_global_batch_size() - running,  # --decrease-batch-size-if-needed
            "running": self._running(0.0),
        }

    def show_launch(self) -> None:
        """Set Megatron's start counters to the launch's, for a checkpoint; train() may have started with others."""
        args = get_args()
        args.iteration = self._launch["iteration"]
        args.num_floating_point_operations_so_far = self._launch["num_floating_point_operations_so_far"]

    def restore(self, counters: dict[str, Any], *, iterations: int, skipped: bool) -> int:
        """Set Megatron's counters, with which its loop begins, to ``counters`` advanced by ``iterations`` (0 or 1).

        ``skipped``: True if that iteration skipped its update because of its loss scale.  Returns the number of
        iterations that the parameters have then seen.
        """
        args = get_args()
        for name, value in counters["args"].items():
            setattr(args, name, value)
        self.schedule(counters, 0 if skipped else iterations)
        self._running(counters["running"])
        for source, position in zip(self._validation, counters["validation"], strict=True):
            source.position = position
        args.consumed_train_samples += counters["batch"] * iterations
        args.skipped_train_samples += counters["dropped"] * iterations
        done = counters["version"] + iterations
        version = args.iteration = args.curr_iteration = with_skipped(done, to_skip())
        for _ in range(version - done):  # each skipped iteration consumes the samples of one batch
            update_num_microbatches(args.consumed_train_samples, consistency_check=False)
            batch = get_current_running_global_batch_size()
            args.consumed_train_samples += batch
            args.skipped_train_samples += batch
        update_num_microbatches(args.consumed_train_samples, consistency_check=False)
        # train() continues to count floating-point operations; exact unless a growing batch is also decreased.
        launch = self._launch = counters["launch"]
        left_out = sum(launch["iteration"] < iteration <= version for iteration in to_skip())
        samples = args.consumed_train_samples - launch["consumed_train_samples"]
        samples -= args.skipped_train_samples - launch["skipped_train_samples"]
        samples += counters["dropped"] * (version - launch["iteration"] - left_out)
        args.num_floating_point_operations_so_far = launch["num_floating_point_operations_so_far"]
        if samples > 0:
            args.num_floating_point_operations_so_far += self._operations(samples)
        return int(version)

    def schedule(self, counters: dict[str, Any], steps: int) -> None:
        """Set the scheduler to its state in ``counters``, as in a checkpoint, advanced by ``steps`` (0 or 1)."""
        vars(self._scheduler).update(counters["scheduler"])  # not from the flags: a checkpoint may differ
        self._scheduler.step(increment=counters["batch"] * steps)

    def schedule_state(self) -> dict[str, Any]:
        """Return the state of the learning rate and weight decay schedule, as in a checkpoint."""
        return dict(self._scheduler.state_dict())

    def agree_on_start(self, device: torch.device) -> None:
        """Measure the run time from the earliest start known to any worker; all workers call it, in a section."""
        seconds = torch.tensor(self._running(0.0), dtype=torch.float64, device=device)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        self._running(seconds.item())

    # ---- rollback to a checkpoint

    def go_back(self, iteration: int) -> None:
        """Reset the counters to ``iteration``, with no sample consumed, as Megatron's load functions expect."""
        args = get_args()
        args.iteration = args.curr_iteration = iteration
        args.consumed_train_samples = args.skipped_train_samples = args.consumed_valid_samples = 0
        self._scheduler.num_steps = 0

    def loaded(self, iteration: int, operations: int) -> None:
        """Set the counters after Megatron has loaded a checkpoint of ``iteration``, as at a start from it.

        ``operations``: the checkpoint's count of floating-point operations.
        """
        args = get_args()
        args.iteration = args.curr_iteration = iteration
        args.num_floating_point_operations_so_far = operations
        # This sets the weight decay.  Megatron set it before it loaded the schedule, so newcomers would differ.
        self._scheduler.step(increment=0)
        self._launch = {**self._of_launch(), "gone back": True}
        for source in self._validation:
            source.position = 0 if getattr(args, "full_validation", False) else args.consumed_valid_samples

    @staticmethod
    def _of_launch() -> dict[str, Any]:
        args = get_args()
        return {name: getattr(args, name) for name in LAUNCH}
