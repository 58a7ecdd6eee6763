"""A script whose training waits for what others say: awaiting.py FIRST[-LAST]:FILE:TEXT[;FILE:TEXT...] SCRIPT flags...

No iteration from FIRST to LAST begins before each FILE, in the log folder, has its TEXT in it; see ``holding``.
"""

import runpy
import sys
from pathlib import Path

from recover_megatron.instep.decision import Decision
from tests.instep.holding import hold

when, script = sys.argv.pop(1), sys.argv.pop(1)
span, _, rest = when.partition(":")
first, _, last = span.partition("-")
folder = Path(sys.argv[sys.argv.index("--recover-log-dir") + 1])
wanted = [(folder / name, text) for name, _, text in (part.partition(":") for part in rest.split(";"))]


def waits(decision: Decision, iteration: int) -> bool:
    held = int(first) <= iteration <= int(last or first)
    return held and not all(path.exists() and text in path.read_text() for path, text in wanted)


hold(waits)
runpy.run_path(script, run_name="__main__")
