"""Record files of a run: steps.jsonl and events.jsonl.

Each replica has a candidate writer: the worker of the last pipeline stage whose tensor rank, context rank and
``View.inner_rank`` are 0.  Every candidate keeps the lines of the last steps in memory; the candidate of the first
replica that is not new in this epoch writes the files.  If that replica is lost, the next candidate writes, beginning
with the committed steps that the lost writer had not written.  So no committed step is missing.

The training waits only a bounded time for the disk (``log_writer``), so a lost writer may leave many queued lines
unwritten.  Therefore a candidate keeps up to ``KEPT_BYTES`` of lines.
"""

from __future__ import annotations

import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import (
    get_current_global_batch_size,
    get_current_running_global_batch_size,
)
from megatron.training import get_args, global_vars
from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

from recover_megatron.instep.decision import Timeline
from recover_megatron.instep.manager import Manager
from recover_megatron.instep.trainer import Outcome
from recover_megatron.logger import get_logger
from recover_megatron.megatron_hooks.gradients.microbatches import skipped_before, to_skip
from recover_megatron.membership.records import Fenced, MembershipError
from recover_megatron.run_log.events import EVENTS_FILE, EventsFile
from recover_megatron.run_log.steps import STEPS_FILE, StepRecord, StepsFile

log = get_logger(__name__)

KEPT_BYTES = 2 << 20
"""Maximum number of bytes of step lines that a candidate keeps.  The queue of the file writer accepts more
bytes, because a new writer adds all kept lines at once."""


class Records:
    """Recent step lines of one worker, and the record files if this worker writes them.

    ``folder``: folder of the files; None if no files are written.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._lines: deque[tuple[int, bytes]] = deque()
        """(iteration, line) of the last steps, oldest first."""
        self._kept = 0
        self._file: StepsFile | None = None
        self._events: EventsFile | None = None
        self._checkpoint = ""
        self._timeline: Timeline = (0, 0)
        """Timeline of the steps in ``_lines``."""
        self._first = True
        """True while, as far as this worker knows, no step of this run can have been written."""
        self._epoch = 0
        self._recoveries = 0
        """Number of epochs, since the last completed step, that began because a replica was lost."""
        self._left_out = (-1, 0)
        """(last iteration that this worker completed, samples that the run had skipped up to that iteration)."""

    def joined_late(self) -> None:
        """Record that the run began before this worker joined."""
        self._first = False

    def step(self, manager: Manager, outcome: Outcome, result: tuple[Any, ...], seconds: float) -> None:
        """Record a completed step; ``result`` is the return value of train_step."""
        _to_megatrons_writers(manager, outcome, seconds, self._recoveries)
        self._recoveries = 0
        args = get_args()
        iteration = args.curr_iteration + 1
        skipped = skipped_before(iteration, args.iteration, to_skip())
        (before, left_out), left_out_now = self._left_out, args.skipped_train_samples
        # If Megatron has decreased this iteration's batch, it counts the skipped samples only after train_step returns.
        decreased = get_current_global_batch_size() - get_current_running_global_batch_size()
        self._left_out = iteration, left_out_now + decreased
        if not self._candidate(manager):
            return
        loss, grad_norm = result[0].get("lm loss"), result[5]
        total = sum(map(len, outcome.counted.values()))
        step = StepRecord(
            iteration=iteration,
            loss=None if loss is None else float(loss),
            grad_norm=None if grad_norm is None else float(grad_norm),
            consumed_samples=args.consumed_train_samples + total * args.micro_batch_size,
            epoch=manager.view.epoch,
            replicas=len(outcome.counted),
            seconds=seconds,
            microbatches=outcome.counted,
            skipped=skipped,
            skipped_samples=left_out_now - left_out if skipped and before == iteration - 1 - skipped else None,
            time=round(time.time(), 3),
            micro_batch_size=args.micro_batch_size,
        )
        self._keep(step)
        if self._writes(manager):
            self._write(manager)
            if outcome.seconds:
                reran = {str(replica): ids for replica, ids in outcome.reran.items()}
                phases = {name: round(value, 6) for name, value in outcome.seconds.items()}
                saved_bytes = outcome.saved_bytes
                self.log(manager, "recovery", epoch=step.epoch, reran=reran, seconds=phases, saved_bytes=saved_bytes)
        self._first = False

    def planned(self, manager: Manager) -> None:
        """Follow a new epoch's plan: start or stop writing if the writer changes, and adopt the plan's timeline.

        A new writer immediately writes the lines that the lost writer had not written, since the run may end any time.
        """
        view = manager.view
        decision, failure = view.decision, view.lost
        self._recoveries += decision.epoch != self._epoch and failure is not None and bool(failure.replicas)
        self._epoch = decision.epoch
        self._follow(decision.timeline)
        if not self._writes(manager):
            if self._file is not None:
                self._file.give_up()
            self._file = None  # another worker extends the file, so this worker must open it again before it writes
        elif self._lines:
            self._write(manager)

    def _follow(self, timeline: Timeline) -> None:
        """Adopt ``timeline``.  After a rollback, forget the lines of the steps that will be run again."""
        if timeline == self._timeline:
            return
        self._timeline = timeline
        self._lines = deque((iteration, line) for iteration, line in self._lines if iteration <= timeline[1])
        self._kept = sum(len(line) for _, line in self._lines)
        if self._file is not None:
            self._file.close()
            self._file = None

    def log(self, manager: Manager, event: str, **fields: Any) -> None:
        """Append an event to events.jsonl, if this worker is the writer."""
        if self._folder is None or not manager.view.started or not self._writes(manager):
            return
        if self._events is None:
            self._events = EventsFile(self._folder / EVENTS_FILE)
        self._events.append(event, worker=manager.view.worker, iteration=get_args().curr_iteration + 1, **fields)

    def saved(self, manager: Manager, iteration: int) -> None:
        """Record that the checkpoint of ``iteration`` is complete."""
        args = get_args()
        self.log(manager, "checkpoint", saved=iteration, folder=str(args.save), asynchronous=bool(args.async_save))
        self._checkpoint = f"iteration {iteration} in {args.save}"

    def last_checkpoint(self) -> str:
        """Return a description of the last checkpoint, for messages; empty before Megatron has arguments."""
        if global_vars._GLOBAL_ARGS is None:
            return ""
        args = get_args()
        if self._checkpoint:
            return self._checkpoint
        if args.load and args.iteration:
            return f"iteration {args.iteration} in {args.load} (from which this run started)"
        return "none was written (--save and --save-interval enable checkpoints)"

    def _candidate(self, manager: Manager) -> bool:
        return (
            parallel_state.is_pipeline_last_stage(ignore_virtual=True)
            and parallel_state.get_tensor_model_parallel_rank() == 0
            and parallel_state.get_context_parallel_rank() == 0
            and manager.view.inner_rank == 0
        )

    def _writes(self, manager: Manager) -> bool:
        # A replica that is new in this epoch does not know which steps were committed, so another replica is preferred.
        decision = manager.view.decision
        first = next((r for r in decision.replicas if r not in decision.fresh), decision.replicas[0])
        return manager.view.replica == first and self._candidate(manager)

    def close(self) -> None:
        """Write the remaining lines, if the disk accepts them, before this worker exits."""
        for file in (self._file, self._events):
            if file is not None:
                file.close()
        self._file = self._events = None

    def _keep(self, step: StepRecord) -> None:
        line = step.to_line()
        self._lines.append((step.iteration, line))
        self._kept += len(line)
        while self._kept > KEPT_BYTES and len(self._lines) > 1:
            self._kept -= len(self._lines.popleft()[1])

    def _write(self, manager: Manager) -> None:
        if self._folder is None:
            return
        if self._file is None:
            path = self._folder / STEPS_FILE
            may_write = partial(_still_in, manager)
            epoch, went_back_to = self._timeline
            if epoch:
                self._file = StepsFile(path, went_back_to + 1, may_write, epoch)
            elif self._first:
                self._file = StepsFile(path, self._lines[-1][0], may_write)
            else:
                self._file = StepsFile(path, None, may_write)
        for iteration, line in self._lines:
            self._file.append_line(iteration, line)
        self._lines.clear()
        self._kept = 0


def _still_in(manager: Manager) -> bool:
    """Return False if this worker was evicted, because another worker then writes the files.

    A process that was suspended, for example by SIGSTOP, may not know this yet, so this function waits until the
    coordinator answers or the run is over.
    """
    try:
        manager.wait_in_touch(in_epoch=False)
    except Fenced:
        return False
    except MembershipError:  # for example, the run has ended
        pass
    return True


def _to_megatrons_writers(manager: Manager, outcome: Outcome, seconds: float, recoveries: int) -> None:
    """Write a completed step's metrics to TensorBoard and W&B, on the rank that has Megatron's writers.

    The metrics have the names of docs/reference/metrics.md.  For a counter, only the increment of this iteration is
    written, because a new writer does not know the total.
    """
    decision, launched = manager.view.decision, manager.view.grid.launched
    recovering = sum(outcome.seconds.values())
    share = min(1.0, len(outcome.counted) / launched) * max(0.0, 1.0 - recovering / seconds)
    numbers = {
        "replicas": len(decision.replicas),
        "replicas_of_launch": launched,
        "workers_live": sum(map(len, decision.grid.values())) + len(decision.spares),
        "spares": len(decision.spares),
        "epoch": decision.epoch,
        "recoveries": recoveries,
        "microbatches_rerun": sum(map(len, outcome.reran.values())),
        "iteration_seconds": seconds,
        "goodput_ratio": share,
        "recovery_seconds": recovering,
        **{f"recovery_seconds/{phase}": value for phase, value in outcome.seconds.items()},
    }
    scalars = {f"recover/{name}": float(value) for name, value in numbers.items()}
    iteration = get_args().curr_iteration + 1
    if board := get_tensorboard_writer():
        for name, value in scalars.items():
            board.add_scalar(name, value, iteration)
    if wandb := get_wandb_writer():
        wandb.log(scalars, iteration)
