"""pretrain_gpt_recover.py where every microbatch takes as long as BENCH_PACES says: seconds by worker, comma-separated.

The time is slept, as a host waits for its GPU: four workers on two cores then take what they are told to.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pretrain_gpt_recover
from recover_megatron.arguments import config_from_argv
from recover_megatron.megatron_hooks.entry.program import choose_device


def pace_of_this_worker() -> float:
    """In seconds; a worker that came later has that of the rank in whose place it came."""
    paces = os.environ["BENCH_PACES"].split(",")
    return float(paces[int(os.environ["RANK"]) % len(paces)])


def main() -> None:
    choose_device(config_from_argv(sys.argv[1:]))  # before anything of Megatron is imported
    from recover_megatron.megatron_hooks.entry import gpt_script

    pace, forward_step = pace_of_this_worker(), gpt_script.forward_step

    def paced_forward_step(*args: Any, **kwargs: Any) -> object:
        """The forward step, and then the rest of the time."""
        until = time.perf_counter() + pace
        result = forward_step(*args, **kwargs)
        time.sleep(max(0.0, until - time.perf_counter()))
        return result

    gpt_script.forward_step = paced_forward_step
    pretrain_gpt_recover.main()


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # Megatron's checkpoint writer is spawned
    choose_device(config_from_argv(sys.argv[1:]))
