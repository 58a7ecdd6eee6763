"""A run whose news of a death parts two mates in a section: parted.py KIND:DYING:FIRST:LATE SCRIPT flags...

In the third section of KIND worker FIRST begins; then worker DYING kills itself, which had not begun; worker LATE
begins when it has been told that the epoch is over.
"""

import os
import runpy
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recover_megatron.instep.rendezvous import Sections

kind, *workers = sys.argv.pop(1).split(":")
dying, first, late = map(int, workers)
script = sys.argv.pop(1)
begun = Path(sys.argv[sys.argv.index("--recover-log-dir") + 1]) / "begun"
run = Sections.run
counted = 0


def noted(section: Callable[[], Any]) -> Callable[[], Any]:
    def begin() -> Any:
        begun.touch()
        return section()

    return begin


def parted(self: Sections, its: str, section: Callable[[], Any], **rest: Any) -> Any:
    global counted
    counted += its == kind
    me = self._assignment.me
    if its == kind and counted == 3:
        if me == first:
            section = noted(section)
        elif me == dying:
            while not begun.exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        elif me == late:
            while not self._assignment.epoch_groups.over:
                time.sleep(0.01)
    return run(self, its, section, **rest)


Sections.run = parted  # type: ignore[method-assign]
runpy.run_path(script, run_name="__main__")
