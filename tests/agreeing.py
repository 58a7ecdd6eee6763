"""A worker's program that needs the control plane only: it agrees on one iteration after the other.

Usage: agreeing.py ITERATIONS STEP_SECONDS [--recover ...]. Every worker writes, to its standard output, JSON lines: who
it is, its plans, and what it ends with. In the environment AGREEING_STRIKES holds what is to happen, as a JSON list of
[worker, iteration, how]: "kill", or an exit code. With AGREEING_LATE newcomers never get ready.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

from recover_megatron.membership import CoordinatorLost, EpochRevoked, Settings
from recover_megatron.membership.worker import connect, is_newcomer, worker_id


def tell(event: str, **fields: object) -> None:
    os.write(1, (json.dumps({"event": event, "worker": worker_id(), **fields}) + "\n").encode())


def strike(iteration: int) -> None:
    """What the environment says happens to this worker in this iteration."""
    for worker, when, how in json.loads(os.environ.get("AGREEING_STRIKES", "[]")):
        if (worker, when) == (worker_id(), iteration):
            tell("strikes", how=how)
            if how != "kill":
                os._exit(how)
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    last, step = int(sys.argv[1]), float(sys.argv[2])
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "RECOVER_JOIN", "RECOVER_SPARE", "RECOVER_NODE_NAME")
    tell("starts", pid=os.getpid(), **{name: os.environ[name] for name in names if name in os.environ})
    if is_newcomer() and "AGREEING_LATE" in os.environ:
        signal.pause()
    session = connect(Settings(heartbeat_interval=0.5, heartbeat_timeout=3.0))
    try:
        plan = session.join({})
        tell("plan", epoch=plan.epoch, members=sorted(plan.members), committed=plan.committed)
        iteration = plan.committed + 1
        while iteration <= last:
            strike(iteration)
            time.sleep(step)
            try:
                session.agree(iteration)
            except EpochRevoked:
                plan = session.join({})
                tell("plan", epoch=plan.epoch, members=sorted(plan.members), committed=plan.committed)
            iteration = session.committed + 1
        session.leave()
    except CoordinatorLost as lost:
        tell("out", code=lost.code, reason=str(lost))
        sys.exit(lost.code)
    tell("ends", committed=session.committed)


if __name__ == "__main__":
    main()
