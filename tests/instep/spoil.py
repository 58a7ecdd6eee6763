"""pretrain_gpt_recover.py that spoils its newest checkpoint: spoil.py WORKER ITERATION flags...

Before that iteration the worker cuts all files of the checkpoint that the tracker file names.
"""

import os
import sys
from pathlib import Path
from typing import Any

from megatron.training import get_args, training

import pretrain_gpt_recover

worker, iteration = sys.argv.pop(1), int(sys.argv.pop(1))
train_step = training.train_step


def spoiling_train_step(*args: Any, **kwargs: Any) -> Any:
    if get_args().curr_iteration + 1 == iteration:
        folder = Path(get_args().save)
        newest = int((folder / "latest_checkpointed_iteration.txt").read_text())
        for path in (folder / f"iter_{newest:07d}").rglob("*.*"):
            if path.is_file():
                os.truncate(path, path.stat().st_size // 2)
    return train_step(*args, **kwargs)


if os.environ["RANK"] == worker and "RECOVER_JOIN" not in os.environ:
    # What --recover wraps is checked by its parameters: keep those of the original.
    spoiling_train_step.__wrapped__ = train_step  # type: ignore[attr-defined]
    training.train_step = spoiling_train_step
pretrain_gpt_recover.main()
