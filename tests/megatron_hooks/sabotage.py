"""pretrain_gpt_recover.py in a Megatron that was tampered with, to see that the audit tells: sabotage.py WHAT flags...

lost-backward     rank 1 leaves out the backward pass of one microbatch in iteration 3
same-data         rank 1 reads rank 0's samples
"""

import os
import sys

from megatron.core.pipeline_parallel import schedules
from megatron.training.datasets import data_samplers

import pretrain_gpt_recover

what = sys.argv.pop(1)
if os.environ["RANK"] == "1":
    if what == "lost-backward":
        backward_step, calls = schedules.backward_step, 0

        def losing_backward_step(*args: object, **kwargs: object) -> object:
            global calls
            calls += 1
            # 4 microbatches an iteration and rank: the second one of the third iteration
            return None if calls == 10 else backward_step(*args, **kwargs)

        schedules.backward_step = losing_backward_step
    elif what == "same-data":
        data_samplers.MegatronPretrainingSampler.get_start_end_idx = lambda self: (0, self.micro_batch_size)
    else:
        raise SystemExit(f"unknown sabotage {what}")
pretrain_gpt_recover.main()
