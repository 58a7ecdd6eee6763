"""Alterations of a script (``altered``) by which writing a checkpoint goes wrong: the disk, the processes that write.

Megatron is imported where it is needed: a checkpoint's writers, processes of their own, import this module.
"""

from __future__ import annotations

import builtins
import multiprocessing
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.instep.faulty import kill_me, stop_me


def fail(*unused: Any, **unused_too: Any) -> None:
    raise AssertionError("a part cannot be written")


def finalize_at_once() -> None:
    """With --async-save: no step is made before what is under way is written."""
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    finalize = AsyncCallsQueue.maybe_finalize_async_calls

    def finalize_all(self: AsyncCallsQueue, blocking: bool = False, no_dist: bool = False) -> list[int]:
        return finalize(self, True, no_dist)

    AsyncCallsQueue.maybe_finalize_async_calls = finalize_all


def when_prepared(workers: str, act: Callable[[int], None]) -> None:
    """Have these workers call ``act`` with the iteration when they have prepared to write a checkpoint."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
    from megatron.training import get_args

    prepare = FileSystemWriterAsync.prepare_write_data

    def prepare_write_data(*args: Any, **kwargs: Any) -> None:
        prepare(*args, **kwargs)
        if os.environ["RANK"] in workers.split(","):
            act(get_args().curr_iteration + 1)

    FileSystemWriterAsync.prepare_write_data = prepare_write_data


def full(disk: str) -> None:
    """Have the disk be full when it comes to the checkpoint of iteration 4; that of iteration 2 is complete by then."""
    from megatron.training import checkpointing, get_args

    make = checkpointing.ensure_directory_exists

    def ensure_directory_exists(*args: Any, **kwargs: Any) -> None:
        make(*args, **kwargs)
        if get_args().curr_iteration >= 3:
            with open(os.path.join(disk, f"of others {os.getpid()}"), "wb", buffering=0) as file:
                try:
                    while True:
                        file.write(bytes(4096))
                except OSError:
                    pass

    finalize_at_once()
    checkpointing.ensure_directory_exists = ensure_directory_exists


def limited(workers: str, first: str) -> None:
    """Have some workers write no large files from the checkpoint of iteration ``first`` on, as by a disk quota.

    If it is written in the background, then the processes that do, which an earlier one has started.  No step is made
    before that is written.
    """
    size = 20000, 20000
    """Soft and hard limit: less than a part of a checkpoint has."""

    def limit(iteration: int) -> None:
        from megatron.training import get_args

        children = [child.pid for child in multiprocessing.active_children()] if get_args().async_save else []
        for process in children or [0]:
            if iteration >= int(first):
                assert process is not None
                resource.prlimit(process, resource.RLIMIT_FSIZE, size)

    finalize_at_once()
    when_prepared(workers, limit)


def lost_loaders(workers: str) -> None:
    """Have workers kill a process that reads their data while they write the checkpoint of iteration 4.

    As the kernel does where memory is short.
    """

    def lose(iteration: int) -> None:
        if iteration == 4:
            loader = next(child for child in multiprocessing.active_children() if type(child).__name__ == "Process")
            loader.kill()
            loader.join()  # until the signal of its end has come

    when_prepared(workers, lose)


def frozen(save: str) -> None:
    """Have worker 0 stopped while it writes the first checkpoint.

    Everything of worker 0 gets SIGSTOP when the first file of the checkpoint is open, and SIGCONT when the tracker file
    in ``save`` exists: its writers go on then, in files that were open and in others that they open by name.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    tracker, stopped = Path(save) / "latest_checkpointed_iteration.txt", Path(f"{save}.stopped")
    worker, torch_save = os.getpid(), torch.save

    def wake_when_the_others_have_written() -> None:
        os.setsid()
        while not (stopped.exists() and tracker.exists()):
            time.sleep(0.05)
            os.kill(worker, 0)
        os.killpg(worker, signal.SIGCONT)

    def stop_once(file: Any) -> Any:
        if not stopped.exists():
            file.write(b"what a first write has left")
            file.flush()
            stopped.touch()
            os.killpg(worker, signal.SIGSTOP)
        return file

    def stopping_open(name: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        file = builtins.open(name, mode, *args, **kwargs)  # noqa: SIM115  as the builtin one
        return stop_once(file) if mode == "wb" and str(name).endswith(".distcp") else file

    def stopping_save(what: Any, where: Any, *args: Any, **kwargs: Any) -> None:
        if not str(where).endswith("model_optim_rng.pt"):
            torch_save(what, where, *args, **kwargs)
            return
        with builtins.open(where, "wb") as file:
            torch_save(what, stop_once(file), *args, **kwargs)

    if os.environ["RANK"] == "0":
        os.environ.pop("RECOVER_NODE_AGENT")  # nobody may kill it when it is put out: its host is not reached
        if os.fork() == 0:
            try:
                wake_when_the_others_have_written()
            finally:
                os._exit(0)
        filesystem_async.open = stopping_open
        torch.save = stopping_save


def wait_for(file: str, pattern: str) -> None:
    while not (Path(file).exists() and re.search(pattern, Path(file).read_text())):
        time.sleep(0.05)


def write_when(file: str, pattern: str, write: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """In the process of a writer."""
    wait_for(file, pattern)
    return write(*args, **kwargs)


def schedule_otherwise(change: Callable[[Any], Any]) -> None:
    """Have each request for an asynchronous checkpoint changed before it goes to the writer."""
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

    schedule = PersistentAsyncCaller.schedule_async_call

    def schedule_changed(self: PersistentAsyncCaller, async_req: Any) -> None:
        schedule(self, change(async_req))

    PersistentAsyncCaller.schedule_async_call = schedule_changed


def held_writers(file: str, pattern: str) -> None:
    """Have every writer wait with every checkpoint until the run's events in ``file`` have ``pattern``.

    (A regular expression.)  Newcomers start when a checkpoint is under way, and at the next look at that one worker 1
    comes after one of them is admitted.
    """
    from megatron.training import async_utils, ft_integration

    start = ft_integration.on_checkpointing_start

    def late_start() -> None:
        """Called by ``train`` before each look, and by others."""
        start()
        if sys._getframe(1).f_code.co_name == "train" and not async_utils.is_empty_async_queue():
            wait_for(file, "is admitted")

    if os.environ.get("RECOVER_JOIN") == "1":
        wait_for(str(Path(file).with_name("events.jsonl")), '"event":"checkpoint begun"')
    elif os.environ["RANK"] == "1":
        ft_integration.on_checkpointing_start = late_start
    schedule_otherwise(lambda its: its._replace(async_fn=partial(write_when, file, pattern, its.async_fn)))


def deadly_writers(how: str) -> None:
    """Have the writer of worker 1, or all, end with a checkpoint.

    write, copy    it kills itself: when it comes to write, or to copy what it is to write
    stop           it stops itself when it comes to write
    fail           every writer ends by an exception, as Megatron's where a thread of it cannot write its part
    """
    stage = "preload_fn" if how == "copy" else "async_fn"
    act = {"fail": fail, "stop": stop_me}.get(how, kill_me)
    if how == "fail" or os.environ["RANK"] == "1":
        schedule_otherwise(lambda its: its._replace(**{stage: act}))


def deadly_wait(how: str) -> None:
    """Have a worker kill itself at the end of the training, where the last checkpoint is waited for.

    enter    worker 1, when it comes to wait for the writers
    told     worker 0, when it has told in the tracker file that the checkpoint is complete
    """
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    finalize = AsyncCallsQueue.maybe_finalize_async_calls

    def deadly_finalize(self: AsyncCallsQueue, blocking: bool = False, no_dist: bool = False) -> list[int]:
        if not blocking and self.async_calls:
            return []
        if blocking and self.async_calls and os.environ["RANK"] == {"enter": "1", "told": "0"}[how]:
            if how == "enter":
                kill_me()
            # Behind Megatron's own, the last of which writes the tracker file.
            self.async_calls[0].async_request.finalize_fns.append(kill_me)
        return finalize(self, blocking, no_dist)

    AsyncCallsQueue.maybe_finalize_async_calls = deadly_finalize
