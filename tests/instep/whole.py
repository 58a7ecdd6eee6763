"""A script whose faults strike one after another, each when the run is whole again.

    whole.py FOLDER REPLICAS WORKERS SCRIPT flags...

Whole: as many replicas as at the launch, all with their state.

WORKERS, comma-separated, is the order.  The training goes on meanwhile, but no more than PATIENCE iterations before the
run is whole again, which takes the longer the busier the machine is (``holding``).
"""

import runpy
import sys
from pathlib import Path
from typing import Any

from recover_megatron.chaos import spec
from recover_megatron.instep.decision import Decision
from recover_megatron.instep.recovery import Recovery
from tests.instep.holding import hold

PATIENCE = 4

folder, replicas = Path(sys.argv.pop(1)), int(sys.argv.pop(1))
order, script = [int(worker) for worker in sys.argv.pop(1).split(",")], sys.argv.pop(1)
recoveries: list[Recovery] = []
began: dict[int, int] = {}
"""Epoch -> the iteration in which it was first seen here."""
begin, at, strike = Recovery.__init__, spec.Injector.at, spec.Injector._inject


def struck() -> list[tuple[int, int]]:
    """Epoch and iteration of each fault so far."""
    texts = [path.read_text() for path in sorted(folder.glob("struck-*"))]
    return [(int(epoch), int(iteration)) for epoch, iteration in map(str.split, texts)]


def noted_init(self: Recovery, *args: Any, **kwargs: Any) -> None:
    recoveries.append(self)
    begin(self, *args, **kwargs)


def in_turn(self: spec.Injector, phase: str, iteration: int) -> None:
    if self.active and (before := len(struck())) < len(order) and recoveries[-1].assignment.me == order[before]:
        decision = recoveries[-1].assignment.decision
        # In the iteration in which a replica takes its place, its state may still be on the way from its only holders.
        placed = not decision.fresh or iteration > began.setdefault(decision.epoch, iteration)
        if len(decision.replicas) == replicas and placed and all(epoch < decision.epoch for epoch, _ in struck()):
            at(self, phase, iteration)


def noted_strike(self: spec.Injector, fault: Any) -> None:
    scratch = folder / "scratch"
    scratch.write_text(f"{recoveries[-1].assignment.decision.epoch} {fault.iteration}")
    scratch.rename(folder / f"struck-{len(struck())}")
    strike(self, fault)


def waits(decision: Decision, iteration: int) -> bool:
    hits = struck()
    return bool(hits) and iteration > hits[-1][1] + PATIENCE + 1 and len(decision.replicas) < replicas


hold(waits)
Recovery.__init__ = noted_init  # type: ignore[method-assign]
spec.Injector.at = in_turn  # type: ignore[method-assign]
spec.Injector._inject = noted_strike  # type: ignore[method-assign]
runpy.run_path(script, run_name="__main__")
