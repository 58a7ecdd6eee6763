"""pretrain_gpt_recover.py with a worker that is killed when it has to build a position's model: newcomer.py WORKER"""

import os
import signal
import sys
from typing import Any

import pretrain_gpt_recover
from recover_megatron.megatron_hooks.entry.fault_tolerance import FaultTolerance

victim = sys.argv.pop(1)
build = FaultTolerance._build_for


def build_for(self: FaultTolerance, *position: Any) -> None:
    build(self, *position)
    os.kill(os.getpid(), signal.SIGKILL)


if os.environ.get("RECOVER_WORKER_ID", os.environ["RANK"]) == victim:
    FaultTolerance._build_for = build_for  # type: ignore[method-assign]
pretrain_gpt_recover.main()
