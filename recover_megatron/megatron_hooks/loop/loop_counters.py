"""Counters of Megatron's training loop, such as iterations and consumed samples, as a state that workers exchange.

The counters are in Megatron's arguments, in its scheduler, and in the positions of the evaluation's data.  When a
worker enters the loop, the counters are set; from then on the loop increments them.
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
"""Names of Megatron's arguments that count consumed samples, choose evaluations, or say how the run started."""
LAUNCH = (
    "iteration", "consumed_train_samples", "skipped_train_samples", "num_floating_point_operations_so_far",
)  # fmt: skip
"""Names of Megatron's arguments whose values at the start of the run or of its timeline are kept."""


class LoopCounters:
    """The counters of one worker's training loop.

    ``validation``: Megatron's iterators over evaluation data, as passed to train().
    ``operations(samples)``: function that returns the number of floating-point operations for ``samples`` samples.
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
        if first_start := os.environ.get(FIRST_START_VARIABLE):  # result of ``time.time()`` when the run started
            running(time.time() - float(first_start))
        self._validation = sources_of(validation)
        self._launch = self._of_launch()
        """The ``LAUNCH`` counters at the start of the run or, after a rollback to a checkpoint in storage, at the
        checkpoint; a worker that joined later receives them."""

    @property
    def first(self) -> int:
        """First iteration of the run or, after a rollback to a checkpoint in storage, the first after the checkpoint.

        It is equal on all workers, whenever they joined.
        """
        return with_skipped(int(self._launch["iteration"]), to_skip()) + 1

    @property
    def gone_back(self) -> bool:
        """True if ``first`` follows a checkpoint that a rollback loaded from storage; equal on all workers."""
        return bool(self._launch.get("gone back"))

    def read(self, version: int | None) -> dict[str, Any]:
        """Return the current counters as a tree.

        ``version``: number of iterations that the parameters have seen, including iterations that skipped their update.
        """
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
        """Set the iteration and the count of operations to their values in ``_launch``, before a checkpoint is written.

        train() of this worker may have started with other values.
        """
        args = get_args()
        args.iteration = self._launch["iteration"]
        args.num_floating_point_operations_so_far = self._launch["num_floating_point_operations_so_far"]

    def restore(self, counters: dict[str, Any], *, iterations: int, skipped: bool) -> int:
        """Set Megatron's counters to ``counters`` advanced by ``iterations`` (0 or 1), before its loop is entered.

        ``skipped``: True if the added iteration skipped its update because of its loss scale.  Returns the number of
        the last completed iteration.  Iterations of --iterations-to-skip that directly follow count as completed, too.
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
        # train() continues from this count of operations.  It is inexact only if the batch size grows and a batch is
        # also decreased (--decrease-batch-size-if-needed).
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
        """Set the scheduler to its state in ``counters``, advanced by ``steps`` (0 or 1)."""
        vars(self._scheduler).update(counters["scheduler"])  # all settings, because a checkpoint may override flags
        self._scheduler.step(increment=counters["batch"] * steps)

    def schedule_state(self) -> dict[str, Any]:
        """Return the state of the learning rate and weight decay schedule, in the form in which Megatron saves it."""
        return dict(self._scheduler.state_dict())

    def agree_on_start(self, device: torch.device) -> None:
        """Adopt the longest run time that any worker has measured; all workers call this in a section."""
        seconds = torch.tensor(self._running(0.0), dtype=torch.float64, device=device)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        self._running(seconds.item())

    # ---- rollback to a checkpoint

    def go_back(self, iteration: int) -> None:
        """Set the counters to ``iteration`` and 0 consumed samples, as Megatron's load functions expect."""
        args = get_args()
        args.iteration = args.curr_iteration = iteration
        args.consumed_train_samples = args.skipped_train_samples = args.consumed_valid_samples = 0
        self._scheduler.num_steps = 0

    def loaded(self, iteration: int, operations: int) -> None:
        """Set the counters as a start from the checkpoint of ``iteration`` would.

        Megatron has just loaded this checkpoint.  ``operations``: the checkpoint's count of floating-point operations.
        """
        args = get_args()
        args.iteration = args.curr_iteration = iteration
        args.num_floating_point_operations_so_far = operations
        # Sets the weight decay from the loaded schedule.  Otherwise newcomers would have another weight decay.
        self._scheduler.step(increment=0)
        self._launch = {**self._of_launch(), "gone back": True}
        for source in self._validation:
            source.position = 0 if getattr(args, "full_validation", False) else args.consumed_valid_samples

    @staticmethod
    def _of_launch() -> dict[str, Any]:
        args = get_args()
        return {name: getattr(args, name) for name in LAUNCH}
