"""pretrain_gpt_recover.py whose disk is full when it comes to the checkpoint of iteration 4: full.py DISK flags..."""

import os
import sys
from typing import Any

from megatron.training import checkpointing, get_args

import pretrain_gpt_recover

DISK = sys.argv.pop(1)
make = checkpointing.ensure_directory_exists


def ensure_directory_exists(*args: Any, **kwargs: Any) -> None:
    make(*args, **kwargs)
    if get_args().curr_iteration >= 3:
        with open(os.path.join(DISK, f"of others {os.getpid()}"), "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass


checkpointing.ensure_directory_exists = ensure_directory_exists
pretrain_gpt_recover.main()
