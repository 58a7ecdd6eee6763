"""--recover-balance: a slow replica gets fewer microbatches.

How long a replica took per microbatch is summed with the gradients (``Tail``), so every worker of a column knows the
same numbers when a step is committed.  Columns measure different ones (stages wait for each other differently), so the
first rank of each model-parallel group, all of which stand in one column, decides for its group.  What one worker may
have heard and another not must not part them, so a new plan begins with the paces that its members have told.
"""

from __future__ import annotations

import torch
from megatron.core import parallel_state

from recover_megatron.instep.recovery import Recovery
from recover_megatron.instep.step import Outcome


def rebalance(recovery: Recovery, outcome: Outcome, total: int) -> None:
    """Take up quotas for the next step by the paces of the one just committed; every worker of the replica calls it.

    A worker that learnt of the commit from a plan leaves it out, as those do whom the plan found further on; and all
    leave out a step that fresh replicas began late, who ran little of it.
    """
    if outcome.by_plan or recovery.assignment.shares.easing:
        return
    replicas = recovery.assignment.decision.replicas
    current = recovery.assignment.shares.counts(recovery.assignment.decision, total)
    paces = {replica: outcome.speeds[replica] for replica in replicas if replica in outcome.speeds}
    balance = recovery.assignment.shares.balance
    if len(paces) == len(replicas):
        balance.measured(paces)
    shares = recovery.assignment.shares
    wanted = balance.counts(current, total, multiple_of=shares.granularity, least=shares.least)
    group = parallel_state.get_model_parallel_group()
    if group.size() > 1:
        counts = torch.tensor([wanted[replica] for replica in replicas], device=torch.cuda.current_device())
        torch.distributed.broadcast(counts, group=group, group_src=0)
        wanted = dict(zip(replicas, counts.tolist(), strict=True))
    if wanted != current:
        recovery.assignment.shares.rebalance(wanted)
        recovery.hooks.log(
            "quotas",
            quotas={str(replica): count for replica, count in wanted.items()},
            seconds_per_microbatch={str(replica): round(pace, 6) for replica, pace in paces.items()},
        )
