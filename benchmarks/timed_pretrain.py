"""pretrain_gpt_recover.py with a clock: the script of the benchmarks that compare complete training runs.

It records the start of each iteration, by the same code with and without --recover.  Environment variables select more
functions:

    BENCH_OUT=DIR           every worker appends a row to DIR/times-<rank>.jsonl before each iteration: "at", the time;
                            "go", the time after the pause of BENCH_BLOCK; "cpu", the processor seconds that the process
                            has used; "loss", the loss of the previous iteration
    BENCH_BLOCK=K           before iterations 1, 1+K, 1+2K, ... the worker writes a byte to DIR/done and waits for a
                            byte in DIR/go-<rank>, so that two runs can take turns
    BENCH_KILL=W@I,...      worker W gets SIGKILL in its first backward pass of iteration I (from 1).  A file in DIR
                            records the kill, so that it is not repeated after a restart
    BENCH_MICROBATCH=S,...  simulates a device of fixed speed: a microbatch takes at least S seconds, a third of them
                            for the forward pass; the worker sleeps until they have passed.  Several values are assigned
                            to the ranks cyclically
    BENCH_MEMORY=1          a row also has "peak", the peak resident KiB since the previous row; "resident", the
                            current resident KiB; and "pid"
    BENCH_RESIDENT=GIB      the worker has this much additional memory from the start, with each page touched
    BENCH_STRUCK=1          a worker that kills itself first writes the time to DIR/struck-<rank>
    BENCH_THREADS=1         a row also has the usage of each thread by name: "threads", the processor seconds; "waits",
                            the number of voluntary context switches
    BENCH_STATE=1           after the training every worker writes DIR/state-<rank>.json: "parameters", the number of
                            parameters of its model; "bytes", the size of its optimizer's own tensors (``held``);
                            "came", the bytes received in each redistribution of a distributed optimizer's state
    BENCH_TRAFFIC=1         a row also has "received", the bytes received over all TCP connections of the process, as
                            the kernel counts them; and "tensors", the bytes of the memory of all torch tensors.  Rings
                            use no shared memory
"""

from __future__ import annotations

import functools
import gc
import json
import os
import runpy
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from recover_megatron.arguments import config_from_argv
from recover_megatron.megatron_hooks.entry.program import load

SCRIPT = Path(__file__).resolve().parent.parent / "pretrain_gpt_recover.py"


class Clock:
    """Wrapper of Megatron's functions in one worker, for the functions listed in the module's docstring."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._rank = int(environment["RANK"])
        self._folder = Path(environment["BENCH_OUT"])
        self._block = int(environment.get("BENCH_BLOCK", "0"))
        self._kills = environment.get("BENCH_KILL", "").split(",")  # kills of all workers
        self._file = open(self._folder / f"times-{self._rank}.jsonl", "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        paces = environment.get("BENCH_MICROBATCH", "0").split(",")
        self._microbatch = float(paces[self._rank % len(paces)])
        more: dict[str, Callable[[], dict[str, Any]]]
        more = {"BENCH_MEMORY": memory, "BENCH_THREADS": threads, "BENCH_TRAFFIC": traffic}
        self._more = [of_row for name, of_row in more.items() if environment.get(name)]
        self._state = bool(environment.get("BENCH_STATE"))
        self._traffic = bool(environment.get("BENCH_TRAFFIC"))
        self._came: list[int] = []
        self._iteration = self._noted = 0
        self._loss: float | None = None

    def install(self) -> None:
        from megatron.core.pipeline_parallel import schedules
        from megatron.training import training

        training.train_step = self._around(training.train_step, self._train_step)
        if self._microbatch:
            schedules.forward_step = self._around(schedules.forward_step, self._forward_step)
        if self._kills != [""] or self._microbatch:
            schedules.backward_step = self._around(schedules.backward_step, self._backward_step)
        if os.environ.get("BENCH_STRUCK"):
            os.kill = self._around(os.kill, self._kill)
        if self._traffic:
            from recover_megatron.collectives import group_factory

            group_factory._slots = lambda *_: None
        if self._state:
            from recover_megatron.instep.state.shards import Shards

            training.train = self._around(training.train, self._train)
            Shards.exchange = self._around(Shards.exchange, self._exchange)  # type: ignore[method-assign]

    @staticmethod
    def _around(original: Any, wrapper: Any) -> Any:
        # functools.wraps keeps the signature, because --recover checks the signatures of functions that it wraps.
        return functools.wraps(original)(lambda *args, **kwargs: wrapper(original, *args, **kwargs))

    def _train_step(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        self._iteration = get_args().curr_iteration + 1
        self._note()
        result = original(*args, **kwargs)
        loss = result[0].get("lm loss")
        self._loss = None if loss is None else float(loss)
        return result

    def _note(self) -> None:
        at = time.monotonic()
        if self._block and self._noted % self._block == 0:
            with open(self._folder / "done", "wb", buffering=0) as done:
                done.write(b"x")
            with open(self._folder / f"go-{self._rank}", "rb", buffering=0) as turn:
                turn.read(1)
        go, used = time.monotonic(), time.process_time()
        row: dict[str, Any] = {"iteration": self._iteration, "at": at, "go": go, "cpu": used, "loss": self._loss}
        for of_row in self._more:
            row |= of_row()
        self._noted += 1
        self._file.write(json.dumps(row) + "\n")

    def _forward_step(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        return at_least(self._microbatch / 3, original, *args, **kwargs)

    def _backward_step(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        kill = f"{self._rank}@{self._iteration}"
        mark = self._folder / f"killed-{kill}"
        if kill in self._kills and not mark.exists():
            mark.write_text(repr(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        return at_least(self._microbatch * 2 / 3, original, *args, **kwargs)

    def _kill(self, original: Any, pid: int, number: int) -> None:
        if pid == os.getpid() and number == signal.SIGKILL:
            (self._folder / f"struck-{self._rank}").write_text(repr(time.monotonic()))
        original(pid, number)

    def _train(self, original: Any, forward_step: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(forward_step, model, optimizer, *args, **kwargs)
        parameters = sum(p.numel() for chunk in model for p in chunk.parameters())
        row = {"parameters": parameters, "bytes": held(optimizer, model), "came": self._came}
        (self._folder / f"state-{self._rank}.json").write_text(json.dumps(row))
        return result

    def _exchange(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        came = original(*args, **kwargs)
        self._came.append(came)
        return came

    def close(self) -> None:
        """Write the last row, after the training."""
        row = {"iteration": None, "at": time.monotonic(), "cpu": time.process_time(), "loss": self._loss}
        self._file.write(json.dumps(row) + "\n")


def at_least(seconds: float, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call ``function``; return its result, not earlier than ``seconds`` after the call began."""
    until = time.monotonic() + seconds
    result = function(*args, **kwargs)
    time.sleep(max(0.0, until - time.monotonic()))
    return result


def held(optimizer: Any, model: Any) -> int:
    """Return the bytes of the tensors that Megatron's optimizer updates or keeps as state.

    Scalars, and tensors in the model's own memory, are not counted.  Uses only torch's optimizer interface, so it works
    for all of Megatron's optimizers, with and without --recover.
    """
    models = {p.untyped_storage().data_ptr() for chunk in model for p in chunk.parameters()}
    sizes: dict[int, int] = {}
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = one.optimizer
        updated = [p for group in inner.param_groups for p in group["params"]]
        for tensor in [*updated, *(value for p in updated for value in inner.state.get(p, {}).values())]:
            if getattr(tensor, "ndim", 0) and tensor.untyped_storage().data_ptr() not in models:
                sizes[tensor.data_ptr()] = tensor.nbytes
    return sum(sizes.values())


def memory() -> dict[str, int]:
    """Return the peak resident KiB of this process since the last call, the current resident KiB, and its pid."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    return {"peak": int(status["VmHWM"].split()[0]), "resident": int(status["VmRSS"].split()[0]), "pid": os.getpid()}


def traffic() -> dict[str, int]:
    """Return the bytes that this process has received over TCP, and the bytes of all its tensors."""
    return {"received": received(), "tensors": tensors()}


def received() -> int:
    """Return the bytes received over the open TCP connections of this process."""
    found: dict[str, int] = {}  # socket -> bytes, because a socket may have two descriptors
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor was closed after the listing, or is no connection
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:") and target not in found:
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    if connection.family in (socket.AF_INET, socket.AF_INET6):
                        found[target] = received_over(connection)
    return sum(found.values())


def received_over(connection: socket.socket) -> int:
    """Return the bytes received over a TCP connection so far, as the kernel counts them."""
    information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    return int(struct.unpack_from("=Q", information, 128)[0])  # tcpi_bytes_received of struct tcp_info


def tensors() -> int:
    """Return the bytes of the memory of all tensors that Python knows, each counted once."""
    import torch

    sizes: dict[int, int] = {}
    for one in gc.get_objects():
        if isinstance(one, torch.Tensor) and type(one) in (torch.Tensor, torch.nn.Parameter):
            storage = one.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def threads() -> dict[str, dict[str, float]]:
    """Return the usage of this process's threads, by thread name; threads unknown to Python are named "other"."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    used: dict[str, float] = {}
    waits: dict[str, float] = {}
    for task in Path("/proc/self/task").iterdir():
        name = names.get(int(task.name), "other")
        status = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
        used[name] = used.get(name, 0.0) + int((task / "schedstat").read_text().split()[0]) / 1e9
        waits[name] = waits.get(name, 0.0) + int(status["voluntary_ctxt_switches"])
    return {"threads": used, "waits": waits}


def main() -> None:
    load(config_from_argv(sys.argv[1:]))
    import torch

    held = torch.ones(int(float(os.environ.get("BENCH_RESIDENT", "0")) * 2**30), dtype=torch.uint8)
    clock = Clock(dict(os.environ))
    clock.install()
    sys.argv[0] = str(SCRIPT)
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    finally:
        clock.close()
        del held


if __name__ == "__main__":
    main()
