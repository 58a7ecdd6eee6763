"""TensorBoard and W&B, whoever is left to tell them: the last rank writes, and some others remember; progress.txt.

Megatron gives its writers to the last rank.  Every worker that may become it has stand-ins in their place:

    Remembering --begin()--> Writing     opens a writer of its own and tells it what the lost one may not have written
         '------- rest() ------'

A writer that was killed takes with it what waited in its queues: what a new one tells may be there twice, at the same
step with the same value.  A thread tells the writers, so that no disk and no server holds up the training.

``ProgressLog`` does the same for what --log-progress adds to progress.txt in --save.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import deque
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.training import get_args, global_vars

from recover_megatron.integrate import Loop
from recover_megatron.log_writer import Aside, LogWriter, flush_all, open_to_append
from recover_megatron.logger import get_logger

log = get_logger(__name__)

KEPT_SECONDS, KEPT_ITERATIONS = 180.0, 4
"""What may not have been written: as young as that, or of so few iterations."""
KEPT_CALLS = 100_000
CALL_BYTES = 256
"""What a call that waits takes, about."""

WRITERS = {
    "_GLOBAL_TENSORBOARD_WRITER": ("TensorBoard", "_set_tensorboard_writer", "tensorboard_dir"),
    "_GLOBAL_WANDB_WRITER": ("W&B", "_set_wandb_writer", "wandb_project"),
}
"""Megatron's writers -> their names, what opens them, the argument that asks for them."""
NOT_OF_WANDB = ("flush", "close")
"""Methods that TensorBoard's writer has, and W&B's has not."""


class Stub:
    """One of Megatron's writers, or none yet: its methods that log are kept, and forwarded where this worker writes.

    ``open`` opens a writer; ``iteration``: that under way.
    """

    def __init__(self, name: str, writer: Any, open_: Callable[[], Any], iteration: Callable[[], int]) -> None:
        self._name, self._writer, self._open, self._iteration = name, writer, open_, iteration
        self._writing = writer is not None
        self._kept: deque[tuple[int, float, str, tuple[Any, ...], dict[str, Any]]] = deque(maxlen=KEPT_CALLS)
        self._aside = Aside(name, most_bytes=2 * KEPT_CALLS * CALL_BYTES)  # begin() tells all that is kept at once

    def add_scalar(self, *args: Any, **kwargs: Any) -> None:
        self._tell("add_scalar", args, kwargs)

    def log(self, *args: Any, **kwargs: Any) -> None:
        self._tell("log", args, kwargs)

    def flush(self) -> None:
        """TensorBoard's: what was told is on the disk, if that takes it within a bounded time."""
        if self._writing:
            self._call("flush", (), {})
            self._aside.flush()

    def __getattr__(self, name: str) -> Any:
        """Anything else is done where this worker writes."""
        if name.startswith("_"):
            raise AttributeError(name)
        if not self._writing or self._writer is None:
            return _Nobody()
        self._aside.flush()
        return getattr(self._writer, name)

    def begin(self) -> None:
        """This worker is the last rank now."""
        if self._writing:
            self._call("flush", (), {})  # a worker that has just lost its place will not remember these steps
            return
        self._writing = True
        if self._writer is None:
            self._aside.submit(self._open_one, CALL_BYTES)
        for _, _, method, args, kwargs in self._kept:
            self._call(method, args, kwargs)
        self._kept.clear()
        self._call("flush", (), {})
        self._aside.settle()

    def rest(self) -> None:
        """Another worker writes on.

        TensorBoard's server reads the files of a folder in the order of their names, and a step takes back what it has
        read of later ones.  So the next turn needs a younger file, which SummaryWriter opens after close().
        """
        if self._writing:
            self._call("close", (), {})
        self._writing = False

    def missed(self) -> None:
        """Others have finished steps without this worker: what it remembers has a gap.

        Told again, the steps before the gap would have TensorBoard's server take back those in it.
        """
        self.rest()
        self._kept.clear()

    def _tell(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Copies: Megatron adds to the tensors of what it has logged.
        args, kwargs = tuple(map(_copy, args)), {name: _copy(value) for name, value in kwargs.items()}
        if self._writing:
            self._call(method, args, kwargs)
            self._aside.settle()
            return
        now, iteration = time.monotonic(), self._iteration()
        kept = self._kept
        while kept and kept[0][0] <= iteration - KEPT_ITERATIONS and kept[0][1] < now - KEPT_SECONDS:
            kept.popleft()
        kept.append((iteration, now, method, args, kwargs))

    def _call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Have the writer told, by the thread: it waits for a disk that does not answer."""
        self._aside.submit(partial(self._carry_out, method, args, kwargs), CALL_BYTES)

    def _open_one(self) -> None:
        try:
            self._writer = self._open()
        except Exception as error:  # noqa: BLE001  what is written for people ends no run
            self._give_up(error)

    def _carry_out(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._writer is None or (method in NOT_OF_WANDB and not hasattr(self._writer, method)):
            return
        try:
            getattr(self._writer, method)(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  what is written for people ends no run
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._writer = None
        log.warning(f"{self._name} is not written any more: {error}")


class _Nobody:
    """Takes any call and any question."""

    def __call__(self, *unused: Any, **unused_too: Any) -> _Nobody:
        return self

    def __getattr__(self, name: str) -> _Nobody:
        return self


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def stand_in() -> None:
    """Put stand-ins in the place of Megatron's writers, where this worker may become the last rank."""
    args = get_args()
    if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        return
    for variable, (name, setter, asked) in WRITERS.items():
        writer = getattr(global_vars, variable, None)
        if getattr(args, asked, None) and not isinstance(writer, Stub):
            setattr(global_vars, variable, Stub(name, writer, _opener(variable, setter), _iteration))


def _iteration() -> int:
    return getattr(get_args(), "curr_iteration", None) or 0


def _opener(variable: str, setter: str) -> Callable[[], Any]:
    def open_() -> Any:
        args = get_args()
        last = argparse.Namespace(**{**vars(args), "rank": args.world_size - 1})  # whom Megatron lets open it
        # Not among Megatron's own variables, where the stand-in is in use meanwhile.
        variables = {**vars(global_vars), variable: None}
        FunctionType(getattr(global_vars, setter).__code__, variables)(last)
        return variables[variable]

    return open_


def _stubs() -> list[Stub]:
    return [its for variable in WRITERS if isinstance(its := getattr(global_vars, variable, None), Stub)]


def take_turns(last: bool) -> None:
    """A new plan: whether this worker is the last rank now."""
    for writer in _stubs():
        writer.begin() if last else writer.rest()


def missed_steps() -> None:
    """This worker takes a place again, and others have finished steps meanwhile."""
    for writer in _stubs():
        writer.missed()


class ProgressLog:
    """progress.txt of --log-progress, which rank 0 writes, by a thread: no disk ends or stops a worker.

    No worker waits for another here, and rank 0 alone reads the file: who is lost, or has another host's view of the
    folder, has no part in it.  Megatron ends by a line that was cut: such a last line is dropped.
    """

    def __init__(self, alone: Callable[[], bool]) -> None:
        """``alone``: whether this worker builds a model while the others train; for it no job begins."""
        self._alone = alone
        self._process = os.getpid()
        self._files: dict[str, LogWriter] = {}
        self._told = False

    def install(self, loop: Loop) -> None:
        """Wrap the seams; raises UserError if the loop's are not the ones we know."""
        loop.wrap("progress_log", self._appending)
        loop.wrap("throughputs", self._telling)

    def finish(self) -> None:
        """This worker's process ends: what was told is on the disk, within a bounded time."""
        flush_all(self._files.values())

    def _opened(self, folder: str) -> LogWriter:
        if folder not in self._files:
            self._files[folder] = LogWriter(
                Path(folder) / "progress.txt", opening=partial(open_to_append, drop_cut=True)
            )
            self._files[folder].make()
        return self._files[folder]

    def _appending(self, original: Callable[..., None]) -> Callable[..., None]:
        def append_to_progress_log(save_dir: str | None, string: str, barrier: bool = True) -> None:
            if os.getpid() != self._process:  # deletes a checkpoint, and bears any error
                return original(save_dir, string, barrier)
            if save_dir is None or self._alone() or dist.get_rank() != 0:
                return None
            file = self._opened(save_dir)
            when, job = f"{datetime.now():%Y-%m-%d %H:%M:%S}", os.environ.get("SLURM_JOB_ID", "")
            words = (when, f"Job ID: {job}", f"# GPUs: {get_args().world_size}", string)
            file.put("\t".join(words).encode() + b"\n")
            file.settle()
            return None

        return append_to_progress_log

    def _telling(self, original: Callable[..., None]) -> Callable[..., None]:
        def compute_throughputs_and_append_to_progress_log(*args: Any, **kwargs: Any) -> None:
            if (save := get_args().save) is None or dist.get_rank() != 0:
                return
            try:
                self._opened(save).settle()
                original(*args, **kwargs)
            except Exception as error:  # noqa: BLE001  what is written for people ends no run
                if not self._told:
                    self._told = True
                    log.warning(f"progress.txt gets no line for a checkpoint, since it cannot be read: {error!r}")

        return compute_throughputs_and_append_to_progress_log


def finish() -> None:
    """The training is over and this worker's process ends: what was told is on the disk, within a bounded time."""
    for writer in _stubs():
        writer.flush()
