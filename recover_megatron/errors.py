"""Errors that several layers raise.

A ``UserError`` contains one or more reasons that the user can fix.  The entry script prints all reasons, without a
traceback, and exits with ``EXIT_USAGE``.  Any other exception is a fault of the program or the machine, and is printed
with its traceback.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

from recover_megatron.variables import JOIN_VARIABLE, SPARE_VARIABLE

EXIT_USAGE = 2
"""Exit code of a process that refuses to start the run; argparse uses the same code."""
EXIT_OWN_FAULT = 1
"""Exit code of a worker that failed for a local reason; its launcher may start a replacement."""


class UserError(Exception):
    """Error for a run that cannot start; each of ``reasons`` is one line with a cause and what the user can do."""

    def __init__(self, *reasons: str) -> None:
        super().__init__("\n".join(reasons))
        self.reasons = reasons


class InStepError(Exception):
    """Base class of the errors that recovery raises during a run."""


class Disagreement(InStepError):
    """Error for contradictory reports of workers, or a sum that differs from the agreed sum; nothing is committed."""


def traceback_wanted() -> bool:
    """Return whether the user has asked for tracebacks of ``UserError`` by RECOVER_TRACEBACK=1."""
    return os.environ.get("RECOVER_TRACEBACK") == "1"


def refuse(program: str, reasons: Sequence[str]) -> NoReturn:
    """Print ``reasons`` as errors of ``program``, and exit with ``EXIT_USAGE``.

    All workers of a node refuse for the same reasons.  So only the first worker of each node, and a worker that joins a
    running job, print the reasons; all other workers exit without a message.
    """
    first = os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) == "0"
    if first or (os.environ.get(JOIN_VARIABLE) == "1" and os.environ.get(SPARE_VARIABLE) != "1"):
        if len(reasons) == 1:
            text = f"{program}: error: {reasons[0]}"
        else:
            text = f"{program}: {len(reasons)} errors:" + "".join(f"\n  - {reason}" for reason in reasons)
        print(text, file=sys.stderr, flush=True)
    sys.exit(EXIT_USAGE)


def end_process() -> NoReturn:
    """Exit with code 0, without the finalization of the Python interpreter.

    Waits for non-daemon threads, calls the ``atexit`` functions (Megatron stops its checkpoint writer there), and
    flushes stdout and stderr.  Call it in the main thread, as its last statement.

    Finalization could abort the process after a successful training (seen with torch 2.13 on a loaded machine): if a
    gloo thread drops the last reference to a tensor during finalization, CPython 3.12 terminates this thread
    (``pthread_exit``), whose stack then unwinds through destructors that must not throw, and the process gets SIGABRT.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # also stops idle threads of concurrent.futures
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(0)
