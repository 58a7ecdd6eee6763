"""A script whose training waits until the run has as many replicas as it should: patient.py WHEN SCRIPT flags...

WHEN is FIRST-LAST:REPLICAS[,...].  No iteration from FIRST to LAST (empty: the end) begins before that many replicas
take part, however long it takes to build their models: that is a matter of the machine's load.  What is excepted:
``holding``; each new replica may cost an iteration.

In place of REPLICAS: ``mirrors=NUMBER``, so many spares that keep the state of the last replica; ``over``, the end of
the epoch in which the workers have come to the iteration.
"""

import runpy
import sys

from recover_megatron.arguments import config_from_argv
from recover_megatron.instep.decision import Decision
from recover_megatron.megatron_hooks.entry.program import choose_device
from tests.instep.holding import hold

choose_device(config_from_argv(sys.argv[3:]))  # as the script does, for those that it runs and that import Megatron

when, script = sys.argv.pop(1), sys.argv.pop(1)
came: dict[int, int] = {}
"""Iteration -> the epoch in which it was come to."""


def waits(decision: Decision, iteration: int) -> bool:
    for part in when.split(","):
        span, _, replicas = part.partition(":")
        first, last = span.split("-")
        if int(first) <= iteration <= int(last or iteration):
            if replicas == "over":
                return came.setdefault(iteration, decision.epoch) == decision.epoch
            what, _, number = replicas.rpartition("=")
            return len(decision.mirrors if what else decision.replicas) < int(number)
    return False


hold(waits)
runpy.run_path(script, run_name="__main__")
