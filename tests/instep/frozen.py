"""pretrain_gpt_recover.py whose worker 0 is stopped while it writes the first checkpoint: frozen.py SAVE flags...

Everything of worker 0 gets SIGSTOP when the first file of the checkpoint is open, and SIGCONT when the tracker file in
SAVE exists: its writers go on then, in files that were open and in others that they open by name.
"""

import builtins
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async

import pretrain_gpt_recover

TRACKER = Path(sys.argv.pop(1)) / "latest_checkpointed_iteration.txt"
worker = os.getpid()
save = torch.save
stopped = Path(f"{TRACKER.parent}.stopped")


def wake_when_the_others_have_written() -> None:
    os.setsid()
    while not (stopped.exists() and TRACKER.exists()):
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
        save(what, where, *args, **kwargs)
        return
    with builtins.open(where, "wb") as file:
        save(what, stop_once(file), *args, **kwargs)


if os.environ["RANK"] == "0":
    os.environ.pop("RECOVER_NODE_AGENT")  # nobody may kill it when it is put out: its host is not reached
    if os.fork() == 0:
        try:
            wake_when_the_others_have_written()
        finally:
            os._exit(0)
    filesystem_async.open = stopping_open
    torch.save = stopping_save
pretrain_gpt_recover.main()
