"""The start of a launch, made again: this process becomes a launcher that has done nothing yet.

A worker that is killed before the training has begun leaves the others in operations that no one can take them out of.
So all launchers of the launch end all of their workers, as for its end, and then each executes its own command line
anew: another store, other coordinators, another run id, the same process id for whoever has started the launcher.
Nothing was trained, so nothing is lost; and nothing of the first try can be mistaken for anything of the next.
"""

from __future__ import annotations

import os
import sys

from recover_megatron.variables import ATTEMPT_VARIABLE

START_AGAIN = -1
"""In place of an exit code: all launchers make the start again."""
AGAIN_SECONDS = 30.0
"""So long the launchers wait for each other then, at most: all of them have just been there."""


def take_attempt() -> int:
    """How often the start was made before; nobody else shall find the variable."""
    text = os.environ.pop(ATTEMPT_VARIABLE, "")
    return int(text) if text.isdecimal() else 0


def start_again(attempt: int) -> None:
    """Be a new launcher; ``attempt``: how often the start has been made by now. Raises OSError; else never returns."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, ATTEMPT_VARIABLE: str(attempt)})
