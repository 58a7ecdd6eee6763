"""pretrain_gpt_recover.py of which some may not write large files, as if their disk quota were used up.

limited.py WORKERS ITERATION flags...: these workers, from the checkpoint of ITERATION on; if it is written in the
background, then the processes that do, which an earlier one has started.  No step is made before that is written.
"""

import multiprocessing
import os
import resource
import runpy
import sys
from typing import Any

BYTES = 20000, 20000
"""Soft and hard limit: less than a part of a checkpoint has."""


def main() -> None:
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
    from megatron.training import get_args

    from tests.megatron_hooks.tiny import OURS

    workers, iteration = sys.argv.pop(1).split(","), int(sys.argv.pop(1))
    prepare = FileSystemWriterAsync.prepare_write_data

    def prepare_write_data(*args: Any, **kwargs: Any) -> None:
        prepare(*args, **kwargs)
        if os.environ["RANK"] in workers and get_args().curr_iteration + 1 >= iteration:
            children = [child.pid for child in multiprocessing.active_children()] if get_args().async_save else []
            for process in children or [0]:
                assert process is not None
                resource.prlimit(process, resource.RLIMIT_FSIZE, BYTES)

    finalize = AsyncCallsQueue.maybe_finalize_async_calls

    def maybe_finalize_async_calls(self: Any, blocking: bool = False, no_dist: bool = False) -> Any:
        return finalize(self, True, no_dist)

    AsyncCallsQueue.maybe_finalize_async_calls = maybe_finalize_async_calls
    FileSystemWriterAsync.prepare_write_data = prepare_write_data
    sys.argv[0] = OURS
    runpy.run_path(OURS, run_name="__main__")


if __name__ == "__main__":
    main()
