"""Errors that several layers raise; a ``UserError`` says what the user can fix, and is shown without a traceback.

``UserError`` carries one or more reasons.  The entry script prints all of them and exits with ``EXIT_USAGE``.  Any
other exception is a fault of the program or the machine and keeps its traceback.
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
"""Exit code of every refusal at start (argparse uses the same)."""
EXIT_OWN_FAULT = 1
"""Exit code of a worker that failed for a local reason: its launcher may start another worker in its place."""


class UserError(Exception):
    """Error for a run that cannot start; each of ``reasons`` says in one line why, and what to do."""

    def __init__(self, *reasons: str) -> None:
        super().__init__("\n".join(reasons))
        self.reasons = reasons


class InStepError(Exception):
    """Base class of the errors that recovery raises for a state of the run."""


class Disagreement(InStepError):
    """Error for contradictory reports of workers, or a sum that differs from the agreed sum; nothing is committed."""


def traceback_wanted() -> bool:
    """Return whether the user wants the traceback of a refusal (RECOVER_TRACEBACK=1)."""
    return os.environ.get("RECOVER_TRACEBACK") == "1"


def refuse(program: str, reasons: Sequence[str]) -> NoReturn:
    """Print the reasons and exit with ``EXIT_USAGE``.

    All workers of a node refuse for the same reasons, so only the first worker of each node, and a worker that joins a
    running job, print the reasons; the other workers exit silently.
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
    """Exit with code 0, in Python's order, but without the interpreter's finalization.

    A gloo thread may keep a reference to a tensor for a moment after the collective.  If it drops the last reference
    while the main thread is finalizing, CPython 3.12 terminates the thread (``pthread_exit``), which unwinds through
    destructors that may not throw: SIGABRT after a successful training.  Seen with torch 2.13 on a loaded machine.

    Waits for non-daemon threads, calls the ``atexit`` functions (Megatron stops its checkpoint writer there), and
    flushes stdout and stderr.  Call it in the main thread, as its last statement.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # also ends idle threads of concurrent.futures
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(0)
