"""Entry point of a new worker process: make the kernel kill it if the launcher dies, then execute the worker's command.

An isolated interpreter (``python -I -S``) runs this file, which imports nothing of the package.  Arguments: the
launcher's pid, then the command.  The parent-death signal survives exec.  If the launcher died before the signal was
set, this process has another parent, and exits.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    launcher, command = int(sys.argv[1]), sys.argv[2:]
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"recover-run: prctl(PR_SET_PDEATHSIG) failed: {os.strerror(ctypes.get_errno())}")
    if os.getsid(0) != os.getpid():  # the launcher's Python could not start this process in a new session
        os.setsid()
    if os.getppid() != launcher:
        os._exit(1)
    # The interpreter ignores these two signals, and an ignored signal stays ignored after exec.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    os.execv(command[0], command)
