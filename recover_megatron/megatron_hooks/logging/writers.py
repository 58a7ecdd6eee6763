"""TensorBoard, W&B and progress.txt of a run that loses workers: the last rank writes, other workers keep recent calls.

In Megatron only the last rank has writers.  Every worker that may become the last rank has a ``Stub`` for each writer:

    Remembering --begin()--> Writing     opens a writer and repeats the calls that the lost writer may not have written
         '------- rest() ------'

If the last rank is killed, the calls in its queues are lost, so the new last rank repeats recent calls.  A repeated
value may appear twice, with the same step.  A thread calls the writers, so that no disk or server delays the training.

``ProgressLog`` writes the lines that --log-progress adds to progress.txt in the folder of --save, also in a thread.
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
from recover_megatron.log_writer import BackgroundWriter, LogWriter, flush_all, open_to_append
from recover_megatron.logger import get_logger

log = get_logger(__name__)

KEPT_SECONDS, KEPT_ITERATIONS = 180.0, 4
"""Age at which a ``Stub`` forgets a kept call, in seconds and in iterations; both must have passed.  By then the last
rank has written the value."""
KEPT_CALLS = 100_000
CALL_BYTES = 256
"""Approximate size of a queued call, in bytes."""

WRITERS = {
    "_GLOBAL_TENSORBOARD_WRITER": ("TensorBoard", "_set_tensorboard_writer", "tensorboard_dir"),
    "_GLOBAL_WANDB_WRITER": ("W&B", "_set_wandb_writer", "wandb_project"),
}
"""Megatron's variable for a writer -> (name of the writer, function that opens it, argument that enables it)."""
NOT_OF_WANDB = ("flush", "close")
"""Methods of TensorBoard's writer that W&B's lacks."""


class Stub:
    """Stand-in for one of Megatron's writers: forwards logging calls if this worker writes, otherwise keeps them.

    ``writer``: Megatron's writer; None on a worker without a writer.  ``open_``: function that opens and returns a
    writer.  ``iteration``: function that returns the current iteration.
    """

    def __init__(self, name: str, writer: Any, open_: Callable[[], Any], iteration: Callable[[], int]) -> None:
        self._name, self._writer, self._open, self._iteration = name, writer, open_, iteration
        self._writing = writer is not None
        self._kept: deque[tuple[int, float, str, tuple[Any, ...], dict[str, Any]]] = deque(maxlen=KEPT_CALLS)
        self._background = BackgroundWriter(
            name, most_bytes=2 * KEPT_CALLS * CALL_BYTES
        )  # begin() submits all kept calls at once

    def add_scalar(self, *args: Any, **kwargs: Any) -> None:
        self._record("add_scalar", args, kwargs)

    def log(self, *args: Any, **kwargs: Any) -> None:
        self._record("log", args, kwargs)

    def flush(self) -> None:
        """Flush the writer to the disk, waiting only a bounded time for the disk."""
        if self._writing:
            self._call("flush", (), {})
            self._background.flush()

    def __getattr__(self, name: str) -> Any:
        """Return the writer's attribute ``name`` if this worker writes; otherwise an object that does nothing."""
        if name.startswith("_"):
            raise AttributeError(name)
        if not self._writing or self._writer is None:
            return _NullWriter()
        self._background.flush()
        return getattr(self._writer, name)

    def begin(self) -> None:
        """Start to write, because this worker is the last rank now: open a writer and repeat the kept calls."""
        if self._writing:
            self._call("flush", (), {})  # the workers that kept a copy of these calls may have lost their places
            return
        self._writing = True
        if self._writer is None:
            self._background.submit(self._open_one, CALL_BYTES)
        for _, _, method, args, kwargs in self._kept:
            self._call(method, args, kwargs)
        self._kept.clear()
        self._call("flush", (), {})
        self._background.wait_done()

    def rest(self) -> None:
        """Stop writing, and close the writer, because another worker is the last rank now.

        If this worker writes again later, SummaryWriter opens a new file, because it was closed.  If this worker used
        the old file again, TensorBoard's server, which reads a folder's files in the order of their names, would find
        an earlier step after later steps, and discard the later steps.
        """
        if self._writing:
            self._call("close", (), {})
        self._writing = False

    def missed(self) -> None:
        """Stop writing and forget the kept calls, because other workers have finished steps without this worker.

        If this worker wrote its old steps again, TensorBoard's server would discard the steps that this worker missed.
        """
        self.rest()
        self._kept.clear()

    def _record(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Copied, because Megatron changes tensors after it has logged them.
        args, kwargs = tuple(map(_copy, args)), {name: _copy(value) for name, value in kwargs.items()}
        if self._writing:
            self._call(method, args, kwargs)
            self._background.wait_done()
            return
        now, iteration = time.monotonic(), self._iteration()
        kept = self._kept
        while kept and kept[0][0] <= iteration - KEPT_ITERATIONS and kept[0][1] < now - KEPT_SECONDS:
            kept.popleft()
        kept.append((iteration, now, method, args, kwargs))

    def _call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Submit a call to the thread, so that the training does not wait for a disk that does not respond."""
        self._background.submit(partial(self._carry_out, method, args, kwargs), CALL_BYTES)

    def _open_one(self) -> None:
        try:
            self._writer = self._open()
        except Exception as error:  # noqa: BLE001  a failed log writer must not end the run
            self._give_up(error)

    def _carry_out(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._writer is None or (method in NOT_OF_WANDB and not hasattr(self._writer, method)):
            return
        try:
            getattr(self._writer, method)(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  a failed log writer must not end the run
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._writer = None
        log.warning(f"{self._name} is disabled on this worker, because its writer failed: {error}")


class _NullWriter:
    """Accepts any call and any attribute access, and does nothing."""

    def __call__(self, *unused: Any, **unused_too: Any) -> _NullWriter:
        return self

    def __getattr__(self, name: str) -> _NullWriter:
        return self


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def stand_in() -> None:
    """Replace Megatron's writers by ``Stub`` objects, if this worker may become the last rank."""
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
        last = argparse.Namespace(**{**vars(args), "rank": args.world_size - 1})  # the rank that opens writers
        # The function runs with a copy of Megatron's variables, because the original variable contains the ``Stub``.
        variables = {**vars(global_vars), variable: None}
        FunctionType(getattr(global_vars, setter).__code__, variables)(last)
        return variables[variable]

    return open_


def _stubs() -> list[Stub]:
    return [stub for variable in WRITERS if isinstance(stub := getattr(global_vars, variable, None), Stub)]


def take_turns(last: bool) -> None:
    """Start or stop this worker's writers after a new plan; ``last``: True if this worker is the last rank now."""
    for writer in _stubs():
        writer.begin() if last else writer.rest()


def missed_steps() -> None:
    """Forget the kept logging calls, because other workers have finished steps since this worker lost its place."""
    for writer in _stubs():
        writer.missed()


class ProgressLog:
    """Writer of --log-progress's file progress.txt on rank 0, in a thread, so that no disk stops or blocks a worker.

    Unlike in Megatron, no worker waits for another worker, and only rank 0 reads the file.  So neither a lost worker
    nor a folder that other hosts do not see does harm.  A truncated last line, on which Megatron fails, is dropped.
    """

    def __init__(self, alone: Callable[[], bool]) -> None:
        """``alone``: function that returns whether this worker builds a model alone; it then logs nothing."""
        self._alone = alone
        self._process = os.getpid()
        self._files: dict[str, LogWriter] = {}
        self._warned = False

    def install(self, loop: Loop) -> None:
        """Wrap the seams of ``loop``; raises UserError if their signatures are unknown."""
        loop.wrap("progress_log", self._appending)
        loop.wrap("throughputs", self._throughputs)

    def finish(self) -> None:
        """Flush progress.txt before the process exits, waiting only a bounded time for the disk."""
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
            if os.getpid() != self._process:  # a child process, which deletes a checkpoint and tolerates errors
                return original(save_dir, string, barrier)
            if save_dir is None or self._alone() or dist.get_rank() != 0:
                return None
            file = self._opened(save_dir)
            when, job = f"{datetime.now():%Y-%m-%d %H:%M:%S}", os.environ.get("SLURM_JOB_ID", "")
            words = (when, f"Job ID: {job}", f"# GPUs: {get_args().world_size}", string)
            file.put("\t".join(words).encode() + b"\n")
            file.wait_done()
            return None

        return append_to_progress_log

    def _throughputs(self, original: Callable[..., None]) -> Callable[..., None]:
        def compute_throughputs_and_append_to_progress_log(*args: Any, **kwargs: Any) -> None:
            if (save := get_args().save) is None or dist.get_rank() != 0:
                return
            try:
                self._opened(save).wait_done()
                original(*args, **kwargs)
            except Exception as error:  # noqa: BLE001  a failed log writer must not end the run
                if not self._warned:
                    self._warned = True
                    log.warning(f"cannot read progress.txt; checkpoints are not logged there: {error!r}")

        return compute_throughputs_and_append_to_progress_log


def finish() -> None:
    """Flush this worker's writers before the process exits, waiting only a bounded time for the disk."""
    for writer in _stubs():
        writer.flush()
