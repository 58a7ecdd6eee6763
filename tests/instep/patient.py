"""A script whose training waits until the run has as many replicas as it should: patient.py WHEN SCRIPT flags...

WHEN is FIRST-LAST:REPLICAS[,...].  No iteration from FIRST to LAST (empty: the end) begins before that many replicas
take part, however long it takes to build their models: that is a matter of the machine's load.  But an epoch that is
over is gone out of at once, since the next one needs everybody; that takes an iteration, and a new replica a few.
"""

import runpy
import sys
import time
from typing import Any

from megatron.training import get_args, training

from recover_megatron.instep.recovery import Recovery

when, script = sys.argv.pop(1), sys.argv.pop(1)
recoveries: list[Recovery] = []
begin, train_step = Recovery.__init__, training.train_step


def wanted(iteration: int) -> int:
    for part in when.split(","):
        span, _, replicas = part.partition(":")
        first, last = span.split("-")
        if int(first) <= iteration <= int(last or iteration):
            return int(replicas)
    return 0


def noted_init(self: Recovery, *args: Any, **kwargs: Any) -> None:
    recoveries.append(self)
    begin(self, *args, **kwargs)


def patient_train_step(*args: Any, **kwargs: Any) -> Any:
    mine = recoveries[-1].assignment if recoveries else None
    while (
        mine is not None
        and mine.started
        and len(mine.decision.replicas) < wanted(get_args().curr_iteration + 1)
        and not mine.epoch_groups.over
    ):
        time.sleep(0.01)
    return train_step(*args, **kwargs)


# What --recover wraps is checked by its parameters: keep those of the original.
patient_train_step.__wrapped__ = train_step  # type: ignore[attr-defined]
Recovery.__init__ = noted_init  # type: ignore[method-assign]
training.train_step = patient_train_step
runpy.run_path(script, run_name="__main__")
