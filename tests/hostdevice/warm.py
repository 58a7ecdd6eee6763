"""``python warm.py JOBS.json``: several Megatron runs, torch and Megatron imported once for all.

The parent activates the host device and imports everything, then forks the workers of one job after the other.  A job
is ``{"workers": N, "flags": [...], "log": FILE}``; rank r writes to FILE.r.  Ends with the first job's status that is
not 0.
"""

import json
import os
import signal
import sys
from pathlib import Path

from recover_megatron import hostdevice
from recover_megatron.errors import end_process
from tests.harness.patience import patient
from tests.harness.processes import free_port

DEADLINE_S = round(patient(240))

hostdevice.activate()  # not in main(): processes that the checkpoint writer spawns import this file


def worker(rank, job, port):
    """The life of one worker, which ends as any Python process does: Megatron stops its checkpoint writer then."""
    import tiny_pretrain

    signal.alarm(DEADLINE_S)
    out = os.open(f"{job['log']}.{rank}", os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    size = str(job["workers"])
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    sys.argv = ["tiny_pretrain.py", *job["flags"]]
    tiny_pretrain.main()
    end_process()


def run(job):
    """Fork the workers of a job and wait for them; the first status that is not 0 ends the others."""
    port, ranks, worst = free_port(), {}, 0
    for rank in range(job["workers"]):
        sys.stdout.flush()
        sys.stderr.flush()
        if (pid := os.fork()) == 0:
            worker(rank, job, port)
        ranks[pid] = rank
    while ranks:
        pid, status = os.wait()
        ranks.pop(pid)
        if status and not worst:
            worst = abs(os.waitstatus_to_exitcode(status))
            for other in ranks:
                os.kill(other, signal.SIGTERM)
    return worst


def main():
    """All jobs of the file, in order."""
    import tiny_pretrain  # noqa: F401
    import torch._dynamo  # noqa: F401  (torch.optim would import it in every worker)
    from megatron.training.models import gpt  # noqa: F401

    for job in json.loads(Path(sys.argv[1]).read_text()):
        if status := run(job):
            sys.exit(status)


if __name__ == "__main__":
    main()
