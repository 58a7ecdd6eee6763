"""TensorBoard and W&B, whoever is left to tell them: the last rank writes, and some others remember.

Megatron gives its writers to the last rank.  Every worker that may become it has stand-ins in their place:

    Remembering --begin()--> Writing     opens a writer of its own and tells it what the lost one may not have written
         '------- rest() ------'

A writer that was killed takes with it what waited in its queues: what a new one tells may be there twice, at the same
step with the same value.  A thread tells the writers, so that no disk and no server holds up the training.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.training import get_args, global_vars

from recover_megatron.log_writer import Aside
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


class Stub:
    """One of Megatron's writers, or none yet: its methods that log are kept, and forwarded where this worker writes.

    ``open`` opens a writer; ``iteration``: that under way.
    """

    def __init__(self, name: str, writer: Any, open_: Callable[[], Any], iteration: Callable[[], int]) -> None:
        self._name, self._writer, self._open, self._iteration = name, writer, open_, iteration
        self._writing = writer is not None
        self._kept: deque[tuple[int, float, str, tuple[Any, ...], dict[str, Any]]] = deque(maxlen=KEPT_CALLS)
        self._aside = Aside(name)

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
            return
        self._writing = True
        if self._writer is None:
            self._aside.submit(self._open_one, CALL_BYTES)
        for _, _, method, args, kwargs in self._kept:
            self._call(method, args, kwargs)
        self._call("flush", (), {})
        self._aside.settle()

    def rest(self) -> None:
        """It is not any more: another writes on."""
        if self._writing:
            self._call("flush", (), {})
        self._writing = False

    def _tell(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        now, iteration = time.monotonic(), self._iteration()
        kept = self._kept
        while kept and kept[0][0] <= iteration - KEPT_ITERATIONS and kept[0][1] < now - KEPT_SECONDS:
            kept.popleft()
        # Copies: Megatron adds to the tensors of what it has logged.
        args, kwargs = tuple(map(_copy, args)), {name: _copy(value) for name, value in kwargs.items()}
        kept.append((iteration, now, method, args, kwargs))
        if self._writing:
            self._call(method, args, kwargs)
            self._aside.settle()

    def _call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Have the writer told, by the thread: it waits for a disk that does not answer."""
        self._aside.submit(partial(self._carry_out, method, args, kwargs), CALL_BYTES)

    def _open_one(self) -> None:
        try:
            self._writer = self._open()
        except Exception as error:  # noqa: BLE001  what is written for people ends no run
            self._give_up(error)

    def _carry_out(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._writer is None or (method == "flush" and not hasattr(self._writer, "flush")):  # W&B's has none
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


def finish() -> None:
    """The training is over and this worker's process ends: what was told is on the disk, within a bounded time."""
    for writer in _stubs():
        writer.flush()
