"""pretrain_gpt_recover.py where every microbatch takes as long as BENCH_PACES says: seconds by worker, comma-separated.

The time is slept, as a host waits for its GPU: four workers on two cores then take what they are told to.
"""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pretrain_gpt_recover
from recover_megatron.megatron_hooks.entry import gpt_script

pace = float(os.environ["BENCH_PACES"].split(",")[int(os.environ["RANK"])])
forward_step = gpt_script.forward_step


def paced_forward_step(*args: object, **kwargs: object) -> object:
    """The forward step, and then the rest of the time."""
    until = time.perf_counter() + pace
    result = forward_step(*args, **kwargs)
    time.sleep(max(0.0, until - time.perf_counter()))
    return result


gpt_script.forward_step = paced_forward_step
pretrain_gpt_recover.main()
