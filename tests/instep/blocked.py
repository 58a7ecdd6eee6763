"""A script one of whose workers waits for its data, from its third microbatch on, until FOLDER/go is there.

blocked.py FOLDER WORKER SCRIPT flags...
"""

import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

from recover_megatron.megatron_hooks.data import Source

folder, worker, script = Path(sys.argv.pop(1)), sys.argv.pop(1), sys.argv.pop(1)
get = Source.get
reads = 0


def blocked_get(self: Source, number: int) -> Any:
    global reads
    reads += 1
    while reads >= 3 and not (folder / "go").exists():
        time.sleep(0.01)
    return get(self, number)


if os.environ["RANK"] == worker:
    Source.get = blocked_get  # type: ignore[method-assign]
runpy.run_path(script, run_name="__main__")
