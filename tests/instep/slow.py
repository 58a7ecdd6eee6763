"""pretrain_gpt_recover.py with workers that take their time at some places: slow.py PLACE@WORKER=SECONDS,... flags...

PLACE: ``joined``, when the first epoch has begun, ``met``, after a rendezvous, ``again``, before sums are made in a
later epoch than the first, or a phase: before a fault may strike in it.  So that what is a race of milliseconds between
workers otherwise is decided.  The seconds are those of an idle machine.
"""

import os
import sys
import time
from typing import Any

import pretrain_gpt_recover
from recover_megatron.instep.assignment import Assignment
from recover_megatron.instep.hooks import ProgressReports
from recover_megatron.instep.rendezvous import Rendezvous
from recover_megatron.membership.session import Session
from tests.harness.patience import patient

pauses: dict[str, float] = {}
for part in sys.argv.pop(1).split(","):
    where, seconds = part.split("=")
    place, worker = where.split("@")
    if worker == os.environ["RANK"]:
        pauses[place] = patient(float(seconds))
assignments: list[Assignment] = []
join, meet, strike, mark = Session.join, Rendezvous.meet, ProgressReports.inject, ProgressReports.mark
make = Assignment.__init__


def slow_join(self: Session, *args: Any) -> Any:
    plan = join(self, *args)
    time.sleep(pauses.pop("joined", 0))
    return plan


def slow_meet(self: Rendezvous, *args: Any) -> None:
    meet(self, *args)
    time.sleep(pauses.get("met", 0))


def slow_strike(self: ProgressReports, phase: str, *args: Any) -> None:
    time.sleep(pauses.get(phase, 0))
    strike(self, phase, *args)


def noted_init(self: Assignment, *args: Any, **kwargs: Any) -> None:
    assignments.append(self)
    make(self, *args, **kwargs)


def slow_mark(self: ProgressReports, phase: str, **how: Any) -> None:
    mark(self, phase, **how)
    if phase == "reduce-scatter" and assignments[-1].epoch_groups.number > 1:
        time.sleep(pauses.pop("again", 0))


Assignment.__init__ = noted_init  # type: ignore[method-assign]
ProgressReports.mark = slow_mark  # type: ignore[method-assign]
Session.join = slow_join  # type: ignore[method-assign]
Rendezvous.meet = slow_meet  # type: ignore[method-assign]
ProgressReports.inject = slow_strike  # type: ignore[method-assign]
pretrain_gpt_recover.main()
