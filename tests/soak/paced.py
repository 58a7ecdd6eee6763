"""pretrain_gpt_recover.py at a walking pace; slower while SOAK_FOLDER/awaits is there, until SOAK_FOLDER/hurry is.

A newcomer takes a second to build its model; nothing is gained if the others run hundreds of iterations meanwhile.
Started as a file it is a stand-in: the worker is forked by the template.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

PAUSE_SECONDS = 0.1
AWAITING_SECONDS = 0.25


def pace(folder: Path) -> None:
    """Every step begins with a pause."""
    from megatron.training import training

    train_step = training.train_step

    def paced_train_step(*args: Any, **kwargs: Any) -> Any:
        if not (folder / "hurry").exists():
            time.sleep(AWAITING_SECONDS if (folder / "awaits").exists() else PAUSE_SECONDS)
        return train_step(*args, **kwargs)

    # What --recover wraps is checked by its parameters: keep those of the original.
    paced_train_step.__wrapped__ = train_step  # type: ignore[attr-defined]
    training.train_step = paced_train_step


def work() -> None:
    """Be the worker that sys.argv and the environment describe."""
    from pretrain_gpt_recover import main
    from recover_megatron.arguments import config_from_argv
    from recover_megatron.megatron_hooks.entry.program import load

    load(config_from_argv(sys.argv[1:]))
    pace(Path(os.environ["SOAK_FOLDER"]))
    main()


if __name__ == "__main__":
    from tests.soak.template import end_as, stand_in

    end_as(stand_in(Path(os.environ["SOAK_FOLDER"])))
