"""pretrain_gpt_recover.py with workers that take their time at some places: slow.py PLACE@WORKER=SECONDS,... flags...

PLACE: ``joined``, when the first epoch has begun, ``met``, after a rendezvous, ``again``, before sums are made in a
later epoch than the first, or a phase: before a fault may strike in it.  So that what is a race of milliseconds between
workers otherwise is decided.
"""

import os
import sys
import time
from typing import Any

import pretrain_gpt_recover
from recover_megatron.instep.marks import Marks
from recover_megatron.instep.recovery import Recovery
from recover_megatron.membership.session import Session

pauses: dict[str, float] = {}
for part in sys.argv.pop(1).split(","):
    where, seconds = part.split("=")
    place, worker = where.split("@")
    if worker == os.environ["RANK"]:
        pauses[place] = float(seconds)
join, rendezvous, strike, mark = Session.join, Recovery.rendezvous, Marks.strike, Marks.mark


def slow_join(self: Session, *args: Any) -> Any:
    plan = join(self, *args)
    time.sleep(pauses.pop("joined", 0))
    return plan


def slow_rendezvous(self: Recovery, *args: Any) -> None:
    rendezvous(self, *args)
    time.sleep(pauses.get("met", 0))


def slow_strike(self: Marks, phase: str, *args: Any) -> None:
    time.sleep(pauses.get(phase, 0))
    strike(self, phase, *args)


def slow_mark(self: Recovery, phase: str, **how: Any) -> None:
    mark(self, phase, **how)
    if phase == "reduce-scatter" and self.generation.number > 1:
        time.sleep(pauses.pop("again", 0))


Recovery.mark = slow_mark  # type: ignore[method-assign]
Session.join = slow_join  # type: ignore[method-assign]
Recovery.rendezvous = slow_rendezvous  # type: ignore[method-assign]
Marks.strike = slow_strike  # type: ignore[method-assign]
pretrain_gpt_recover.main()
