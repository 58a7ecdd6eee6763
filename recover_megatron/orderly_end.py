"""The end of a process that used gloo, without tearing Python down.

A thread of gloo's may hold a tensor for a moment after the collective is over (``c10d::ProcessGroupGloo::runLoop``
tells who waits first).  Where it gives up the last reference to a tensor that Python knows, it asks for the
interpreter.  If the main thread is finalizing that by then, CPython 3.12 ends the asking thread (``pthread_exit``),
which unwinds through destructors that may not throw: ``terminate called without an active exception``, SIGABRT, after a
training that had ended well.  Seen with torch 2.13 on a loaded machine.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import NoReturn


def end_process(code: int = 0) -> NoReturn:
    """End this process with ``code`` as Python would, in its order, but for the interpreter's own finalization.

    Waits for threads that are not daemons, calls what ``atexit`` holds (Megatron stops its checkpoint writer there),
    and writes out stdout and stderr.  Call it in the main thread, where nothing is left to do.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # also ends idle threads of concurrent.futures
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(code)
