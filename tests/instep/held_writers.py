"""A script whose checkpoints are held up, or whose workers die with one: held_writers.py HOW SCRIPT flags...

HOW:

    FILE=PATTERN   every writer waits with every checkpoint until the run's events in FILE have PATTERN (a regular
                   expression).  Newcomers start when a checkpoint is under way, and at the next look at that one worker
                   1 comes after one of them is admitted
    enter          worker 1 kills itself when it comes to wait for the writers, at the end of the training
    told           worker 0 does, when it has told in the tracker file that the checkpoint is complete
    write, copy    the writer of worker 1 kills itself: when it comes to write, or to copy what it is to write
    stop           it stops itself when it comes to write
    fail           every writer ends by an exception, as Megatron's where a thread of it cannot write its part
"""

import os
import re
import runpy
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, PersistentAsyncCaller
from megatron.training import async_utils, ft_integration


def wait_for(file: str, pattern: str) -> None:
    while not (Path(file).exists() and re.search(pattern, Path(file).read_text())):
        time.sleep(0.05)


def write_when(file: str, pattern: str, write: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """In the process of a writer."""
    wait_for(file, pattern)
    return write(*args, **kwargs)


def kill_me(*unused: Any, **unused_too: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop_me(*unused: Any, **unused_too: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def fail(*unused: Any, **unused_too: Any) -> None:
    raise AssertionError("a part cannot be written")


def main() -> None:
    how, script = sys.argv.pop(1), sys.argv.pop(1)
    here = sys.modules["tests.instep.held_writers"]
    file, _, pattern = how.partition("=")
    schedule, finalize = PersistentAsyncCaller.schedule_async_call, AsyncCallsQueue.maybe_finalize_async_calls

    def held_call(self: PersistentAsyncCaller, async_req: Any) -> None:
        schedule(self, async_req._replace(async_fn=partial(here.write_when, file, pattern, async_req.async_fn)))

    def deadly_call(self: PersistentAsyncCaller, async_req: Any) -> None:
        if how == "fail":
            async_req = async_req._replace(async_fn=here.fail)
        elif os.environ["RANK"] == "1":
            what = here.stop_me if how == "stop" else here.kill_me
            async_req = async_req._replace(**{"preload_fn" if how == "copy" else "async_fn": what})
        schedule(self, async_req)

    def deadly_wait(self: AsyncCallsQueue, blocking: bool = False, no_dist: bool = False) -> list[int]:
        if not blocking and self.async_calls:
            return []
        dies = os.environ["RANK"] == ("1" if how == "enter" else "0")
        if not blocking or not self.async_calls or not dies:
            return finalize(self, blocking, no_dist)
        if how == "told":
            # Behind Megatron's own, the last of which writes the tracker file.
            self.async_calls[0].async_request.finalize_fns.append(partial(os.kill, os.getpid(), signal.SIGKILL))
            return finalize(self, blocking, no_dist)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    def late_start() -> None:
        """Called by ``train`` before each look, and by others."""
        start()
        if sys._getframe(1).f_code.co_name == "train" and not async_utils.is_empty_async_queue():
            wait_for(file, "is admitted")

    start = ft_integration.on_checkpointing_start
    if pattern:
        if os.environ.get("RECOVER_JOIN") == "1":
            wait_for(str(Path(file).with_name("events.jsonl")), '"event":"checkpoint begun"')
        elif os.environ["RANK"] == "1":
            ft_integration.on_checkpointing_start = late_start
        PersistentAsyncCaller.schedule_async_call = held_call  # type: ignore[method-assign]
    elif how in ("write", "copy", "stop", "fail"):
        PersistentAsyncCaller.schedule_async_call = deadly_call  # type: ignore[method-assign]
    else:
        AsyncCallsQueue.maybe_finalize_async_calls = deadly_wait  # type: ignore[method-assign]
    sys.argv[0] = script
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    from tests.instep import held_writers

    held_writers.main()
