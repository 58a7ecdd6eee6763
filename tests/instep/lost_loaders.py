"""pretrain_gpt_recover.py of which some lose a process that reads their data: lost_loaders.py WORKERS flags...

They kill it, as the kernel does where memory is short, while they write the checkpoint of iteration 4.
"""

import multiprocessing
import os
import runpy
import sys
from typing import Any


def main() -> None:
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
    from megatron.training import get_args

    from tests.megatron_hooks.tiny import OURS

    workers = sys.argv.pop(1).split(",")
    prepare = FileSystemWriterAsync.prepare_write_data

    def prepare_write_data(*args: Any, **kwargs: Any) -> None:
        prepare(*args, **kwargs)
        if os.environ["RANK"] in workers and get_args().curr_iteration == 3:
            loader = next(child for child in multiprocessing.active_children() if type(child).__name__ == "Process")
            loader.kill()
            loader.join()  # until the signal of its end has come

    FileSystemWriterAsync.prepare_write_data = prepare_write_data
    sys.argv[0] = OURS
    runpy.run_path(OURS, run_name="__main__")


if __name__ == "__main__":
    main()
