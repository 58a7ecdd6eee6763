"""pretrain_gpt_recover.py whose disk is full when it comes to the checkpoint of iteration 4: full.py DISK flags...

With --async-save the training waits after each step for what is written: that of iteration 2 is complete by then.
"""

import os
import runpy
import sys
from typing import Any


def main() -> None:
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
    from megatron.training import checkpointing, get_args

    from tests.megatron_hooks.tiny import OURS

    disk = sys.argv.pop(1)
    make = checkpointing.ensure_directory_exists
    finalize = AsyncCallsQueue.maybe_finalize_async_calls

    def ensure_directory_exists(*args: Any, **kwargs: Any) -> None:
        make(*args, **kwargs)
        if get_args().curr_iteration >= 3:
            with open(os.path.join(disk, f"of others {os.getpid()}"), "wb", buffering=0) as file:
                try:
                    while True:
                        file.write(bytes(4096))
                except OSError:
                    pass

    def finalize_all(self: AsyncCallsQueue, blocking: bool = False, no_dist: bool = False) -> list[int]:
        return finalize(self, True, no_dist)

    AsyncCallsQueue.maybe_finalize_async_calls = finalize_all
    checkpointing.ensure_directory_exists = ensure_directory_exists
    sys.argv[0] = OURS
    runpy.run_path(OURS, run_name="__main__")


if __name__ == "__main__":
    main()
