"""``held.py STEP FILE SCRIPT ARGUMENTS...``: an elastic training that begins no step after STEP before FILE is there.

So a test strikes a run that goes on at its own pace, and on a machine that keeps the test waiting the run is not over
before that.
"""

import runpy
import sys
import time
from pathlib import Path
from typing import Any

from recover_megatron import ElasticDataParallel

last, file = int(sys.argv.pop(1)), Path(sys.argv.pop(1))
script = str(Path(__file__).parents[2] / sys.argv.pop(1))
step = ElasticDataParallel.step


def held_step(elastic: ElasticDataParallel, *given: Any, **named: Any) -> Any:
    while elastic.completed >= last and not file.exists():
        time.sleep(0.01)
    return step(elastic, *given, **named)


ElasticDataParallel.step = held_step  # type: ignore[method-assign]
sys.argv[0] = script
runpy.run_path(script, run_name="__main__")
