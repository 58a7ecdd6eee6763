"""Errors that several layers raise; those for people tell in plain words, without a traceback, what they can mend.

``UserError`` carries one or more reasons.  The entry script prints them all at once and ends with ``EXIT_USAGE``; any
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
"""Exit code of every refusal at start (argparse's own)."""
EXIT_OWN_FAULT = 1
"""Exit code of any fault of a worker's own: its launcher may start another one in its place."""


class UserError(Exception):
    """The run cannot start; ``reasons`` say why and what to do, one per line."""

    def __init__(self, *reasons: str) -> None:
        super().__init__("\n".join(reasons))
        self.reasons = reasons


class InStepError(Exception):
    """Base of what the recovery raises for a state of the run."""


class Disagreement(InStepError):
    """Workers tell of what no order of events explains, or a sum is not what was agreed: nothing is committed."""


def traceback_wanted() -> bool:
    """Whether a refusal is to be shown with its traceback, as raised."""
    return os.environ.get("RECOVER_TRACEBACK") == "1"


def refuse(program: str, reasons: Sequence[str]) -> NoReturn:
    """Print the reasons and exit with ``EXIT_USAGE``.

    The workers of a node refuse for the same reasons, so only the first one of each node prints, and whoever comes into
    a running job by itself; the others exit silently.
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
    """End this process with 0 as Python would, in its order, but for the interpreter's own finalization.

    A thread of gloo's may hold a tensor for a moment after the collective is over.  If it gives up the last reference
    while the main thread is finalizing, CPython 3.12 ends it (``pthread_exit``), which unwinds through destructors that
    may not throw: SIGABRT, after a training that had ended well.  Seen with torch 2.13 on a loaded machine.

    Waits for threads that are not daemons, calls what ``atexit`` holds (Megatron stops its checkpoint writer there),
    and writes out stdout and stderr.  Call it in the main thread, where nothing is left to do.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # also ends idle threads of concurrent.futures
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(0)
