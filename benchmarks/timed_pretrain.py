"""pretrain_gpt_recover.py with a clock in it: the script of the benchmarks that compare whole training runs.

It notes when each iteration begins, by the same few lines with and without --recover, and does what the environment
asks for besides (nothing, by default):

    BENCH_OUT=DIR           every worker appends to DIR/times-<rank>.jsonl: {"iteration", "at", "loss"}, "at" being the
                            moment before the iteration, "loss" that of the one before it, "go": when it went on
    BENCH_BLOCK=K           before iterations 1, 1+K, 1+2K, ... the worker writes a byte to DIR/done and waits for one
                            in DIR/go-<rank>: so two runs can take turns
    BENCH_KILL=W@I,...      worker W gets SIGKILL in its first backward pass of iteration I (from 1), once: a file in
                            DIR says that it has happened
    BENCH_PROFILE=FILE      cProfile of rank 0's main thread from iteration 10 on, dumped at the end
"""

from __future__ import annotations

import cProfile
import functools
import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve().parent.parent / "pretrain_gpt_recover.py"
PROFILE_FROM = 10


class Clock:
    """Wraps train_step (inside what --recover wraps around it) and, for kills, the backward pass."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._rank = int(environment["RANK"])
        self._folder = Path(environment["BENCH_OUT"])
        self._block = int(environment.get("BENCH_BLOCK", "0"))
        self._kills = {int(at) for worker, at in _kills(environment.get("BENCH_KILL", "")) if worker == self._rank}
        self._file = open(self._folder / f"times-{self._rank}.jsonl", "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        self._profile = environment.get("BENCH_PROFILE") if self._rank == 0 else None
        self._profiler = cProfile.Profile()
        self._iteration = 0
        self._first: int | None = None
        self._loss: float | None = None

    def install(self) -> None:
        from megatron.core.pipeline_parallel import schedules
        from megatron.training import training

        training.train_step = self._around(training.train_step, self._train_step)
        if self._kills:
            schedules.backward_step = self._around(schedules.backward_step, self._backward_step)

    @staticmethod
    def _around(original: Any, wrapper: Any) -> Any:
        # What --recover wraps is checked by its parameters: keep those of the original.
        return functools.wraps(original)(lambda *args, **kwargs: wrapper(original, *args, **kwargs))

    def _train_step(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        self._iteration = get_args().curr_iteration + 1
        if self._first is None:
            self._first = self._iteration
        self._note()
        if self._profile and self._iteration == self._first + PROFILE_FROM:
            self._profiler.enable()
        result = original(*args, **kwargs)
        loss = result[0].get("lm loss")
        self._loss = None if loss is None else float(loss)
        return result

    def _note(self) -> None:
        at = time.monotonic()
        assert self._first is not None
        if self._block and (self._iteration - self._first) % self._block == 0:
            with open(self._folder / "done", "wb", buffering=0) as done:
                done.write(b"x")
            with open(self._folder / f"go-{self._rank}", "rb", buffering=0) as go:
                go.read(1)
        row = {"iteration": self._iteration, "at": at, "go": time.monotonic(), "loss": self._loss}
        self._file.write(json.dumps(row) + "\n")

    def _backward_step(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if self._iteration in self._kills:
            mark = self._folder / f"killed-{self._rank}@{self._iteration}"
            if not mark.exists():
                mark.write_text(repr(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    def close(self) -> None:
        """The run is over."""
        self._file.write(json.dumps({"iteration": None, "at": time.monotonic(), "loss": self._loss}) + "\n")
        if self._profile:
            self._profiler.disable()
            self._profiler.dump_stats(self._profile)


def _kills(text: str) -> list[tuple[int, int]]:
    """(worker, iteration) of each kill."""
    pairs = (item.split("@") for item in text.split(",") if item)
    return [(int(worker), int(iteration)) for worker, iteration in pairs]


def main() -> None:
    """Install the clock, then be the script."""
    from recover_megatron.arguments import config_from_argv
    from recover_megatron.megatron_hooks.program import load

    load(config_from_argv(sys.argv[1:]))
    clock = Clock(dict(os.environ))
    clock.install()
    sys.argv[0] = str(SCRIPT)
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    finally:
        clock.close()


if __name__ == "__main__":
    main()
