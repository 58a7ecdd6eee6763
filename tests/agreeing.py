"""A worker's program that needs the control plane only: it agrees on one iteration after the other.

Usage: agreeing.py ITERATIONS STEP_SECONDS [--recover ...]. A worker prints JSON lines: who it is, its plans, and what
it ends with. In the environment:

AGREEING_STRIKES   what is to happen, a JSON list of [worker, iteration (0: its first), how]: "kill"; "stop";
                   "fault", an exception that is told; or an exit code
AGREEING_AWAITS    how many newcomers must have been in one plan before the iterations are counted; or a JSON list of
                   workers that must
AGREEING_UNTIL     a file: before it is there the iterations are not counted, so the run does not end
AGREEING_LATE      newcomers never get ready; each makes the file of AGREEING_UNTIL, if one is named
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from recover_megatron.arguments import config_from_argv
from recover_megatron.membership import CoordinatorLost, EpochRevoked, Plan, Session, Settings
from recover_megatron.membership.io.session import connect, is_newcomer, worker_id

PLACE = "RANK LOCAL_RANK WORLD_SIZE RECOVER_JOIN RECOVER_SPARE RECOVER_REPLACED RECOVER_NODE_NAME".split()
"""Variables that say who a worker is."""


def tell(event: str, **fields: object) -> None:
    os.write(1, (json.dumps({"event": event, "worker": worker_id(), **fields}) + "\n").encode())


def strike(session: Session, iteration: int) -> None:
    """What the environment says happens to this worker in this iteration."""
    for worker, when, how in json.loads(os.environ.get("AGREEING_STRIKES", "[]")):
        if worker == worker_id() and when in (0, iteration):
            tell("strikes", how=how)
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
                continue
            if how == "fault":
                session.report_exception(iteration, None, "ValueError: no such token", "", worker)
                os._exit(1)
            os._exit(how)


class Until:
    """The iterations from AGREEING_UNTIL on, the same for all workers, whenever each of them looks.

    The first worker of the plan writes the last one down before it agrees on an iteration, and the others see it there
    when they have agreed on that one.
    """

    def __init__(self, iterations: int) -> None:
        self._iterations = iterations
        self._file = Path(os.environ.get("AGREEING_UNTIL", ""))
        self._last = self._file.with_name(f"{self._file.name}.last") if self._file.name else None

    def last(self, iteration: int, plan: Plan) -> int | None:
        """The last iteration, as far as this is known before ``iteration``; None: there is none yet."""
        if self._last is None:
            return 0
        if not self._last.exists() and worker_id() == min(plan.members) and self._file.exists():
            new = self._last.with_name(f"{self._last.name}.{worker_id()}")
            new.write_text(str(iteration + self._iterations))
            new.rename(self._last)
        return int(self._last.read_text()) if self._last.exists() else None


def work(session: Session, iterations: int, step: float) -> None:
    world, awaited = int(os.environ["WORLD_SIZE"]), json.loads(os.environ.get("AGREEING_AWAITS", "0"))
    last: int | None = None
    until = Until(iterations)

    def join() -> Plan:
        nonlocal last
        plan = session.join({})
        tell("plan", epoch=plan.epoch, members=sorted(plan.members), committed=plan.committed)
        came = sum(member >= world for member in plan.members)
        if last is None and (came >= awaited if isinstance(awaited, int) else plan.members >= set(awaited)):
            last = iterations + (plan.committed if awaited else 0)
        return plan

    plan = join()
    iteration = plan.committed + 1
    while last is None or (held := until.last(iteration, plan)) is None or iteration <= max(last, held):
        strike(session, iteration)
        session.mark(iteration, "compute")
        time.sleep(step)
        try:
            session.agree(iteration)
        except EpochRevoked:
            plan = join()
        iteration = session.committed + 1
    session.leave()


def main() -> None:
    config = config_from_argv(sys.argv[3:])
    settings = Settings(config.heartbeat_interval, config.heartbeat_timeout, config.hang_timeout)
    tell("starts", pid=os.getpid(), **{name: os.environ[name] for name in PLACE if name in os.environ})
    if is_newcomer() and "AGREEING_LATE" in os.environ:
        if until := os.environ.get("AGREEING_UNTIL"):
            Path(until).touch()
        signal.pause()
    session = connect(settings)
    try:
        work(session, int(sys.argv[1]), float(sys.argv[2]))
    except CoordinatorLost as lost:
        tell("out", code=lost.code, reason=str(lost))
        sys.exit(lost.code)
    tell("ends", committed=session.committed)


if __name__ == "__main__":
    main()
