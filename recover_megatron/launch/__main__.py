"""The command ``recover-run``: see docs/operations.md."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line ``argv`` (default: the arguments of this process) and end the process with its exit code."""
    # No worker runs until the supervisor handles SIGINT, so Ctrl-C may simply end the process, without a traceback.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from recover_megatron.launch.command import run_guarded
    from recover_megatron.launch.workers.processes import START_AGAIN, start_again, take_attempt, take_left_out
    from recover_megatron.variables import FIRST_START_VARIABLE

    attempt = take_attempt()
    if not attempt:  # this launcher may have inherited the variable from a worker of another run
        os.environ.pop(FIRST_START_VARIABLE, None)
    code = run_guarded(sys.argv[1:] if argv is None else argv, attempt, take_left_out())
    if code == START_AGAIN:
        start_again(attempt + 1)
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads may be blocked in the store's C++ code: the interpreter's shutdown could hang or crash because of them.
    os._exit(code)


if __name__ == "__main__":
    main()
