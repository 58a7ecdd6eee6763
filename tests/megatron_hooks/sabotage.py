"""pretrain_gpt_recover.py in a Megatron that was tampered with, to see that the audit tells: sabotage.py WHAT flags...

lost-backward     rank 1 leaves out the backward pass of one microbatch in iteration 3
lost-and-summed   the same, and rank 1 notices it when all buckets of which the sum has begun are summed
other-samples     rank 1 reads the samples before those that it is asked for
slow              rank 1 needs 0.3 s more for each microbatch, and on a busy host a multiple of what that takes there
same-share        rank 1 thinks that rank 0's share is its own, and does not get what rank 0 has summed of the tail
"""

import functools
import os
import sys
import time

import torch
from megatron.core.pipeline_parallel import schedules

import pretrain_gpt_recover
from recover_megatron.collectives.ring.executor import Ring, RingTask
from recover_megatron.collectives.ring.schedule import Action, Receive
from recover_megatron.instep import trainer as gradients
from recover_megatron.instep.meeting import assignment
from recover_megatron.megatron_hooks.data import source as data
from recover_megatron.megatron_hooks.entry import gpt_script
from recover_megatron.megatron_hooks.gradients import microbatches

what = sys.argv.pop(1)
if os.environ["RANK"] == "1":
    if what in ("lost-backward", "lost-and-summed"):
        backward_step, calls, under_way = schedules.backward_step, 0, []

        @functools.wraps(backward_step)  # the seam is checked
        def losing_backward_step(*args: object, **kwargs: object) -> object:
            global calls
            calls += 1
            # 4 microbatches an iteration and rank: the second one of the third iteration
            return None if calls == 10 else backward_step(*args, **kwargs)

        schedules.backward_step = losing_backward_step
        if what == "lost-and-summed":
            submit, check = gradients.Gradients._submit, microbatches.Accumulated.check

            def noted_submit(self: gradients.Gradients, *args: object) -> None:
                global under_way
                under_way = self._handles
                submit(self, *args)

            def late_check(*args: object) -> None:
                for handle in under_way:
                    handle.wait()
                check(*args)

            gradients.Gradients._submit = noted_submit
            microbatches.Accumulated.check = late_check
    elif what == "other-samples":
        data.TaggedDataset.__getitem__ = lambda self, index: {**self._dataset[index], data.SAMPLE: int(index) - 2}
    elif what == "same-share":
        share = assignment.Assignment.share
        assignment.Assignment.share = lambda self, total: [
            [j - 1 for j in inner_rank] for inner_rank in share(self, total)
        ]
        handle_segment = Ring._handle

        def handle_none_of_the_tail(self: Ring, run: RingTask, receive: Receive, arrival: object) -> None:
            if receive.action is Action.STORE and run.spec.flat.dtype is torch.float64:
                self._transport._cancel_token.wait()
                self._transport._cancel_token.check()
            handle_segment(self, run, receive, arrival)

        Ring._handle = handle_none_of_the_tail
    elif what == "slow":
        forward_step = gpt_script.forward_step

        def slow_forward_step(*args: object, **kwargs: object) -> object:
            started = time.perf_counter()
            result = forward_step(*args, **kwargs)
            time.sleep(max(0.3, 10 * (time.perf_counter() - started)))
            return result

        gpt_script.forward_step = slow_forward_step
    else:
        raise SystemExit(f"unknown sabotage {what}")
pretrain_gpt_recover.main()
