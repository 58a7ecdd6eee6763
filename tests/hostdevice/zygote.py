"""A process with torch imported that runs each piece of code it is sent in a fork of itself.

Importing torch takes seconds; what the host device does to a process is forever.  So every test forks its own.
Reads lines ``{"code": ..., "output": FILE, "path": [...], "environment": {...}}``, answers with the exit status.
"""

import json
import os
import signal
import sys

import torch  # noqa: F401  (the point of this process)

from tests.harness.patience import patient
from tests.harness.processes import end_with

DEADLINE_S = round(patient(120))


def child(job):
    """Run one piece of code and leave."""
    signal.alarm(DEADLINE_S)
    out = os.open(job["output"], os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.path[:0] = job["path"]
    os.environ.update(job["environment"])
    end_with(lambda: exec(compile(job["code"], "<test>", "exec"), {"__name__": "test_code"}))


def main():
    """Until standard input ends."""
    for line in sys.stdin:
        if (pid := os.fork()) == 0:
            child(json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
