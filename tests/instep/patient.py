"""pretrain_gpt_recover.py that waits for a newcomer: patient.py FOLDER ITERATION flags...

In that iteration worker 0, and with it all others, waits until a newcomer has built its model, which takes the longer
the busier the machine is; the newcomer says so by a file in the folder.  In the iteration before, it waits until the
newcomer is admitted: it builds nothing before the plan of the epoch that follows, which needs worker 0.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

from megatron.training import get_args, training

import pretrain_gpt_recover

folder, iteration = Path(sys.argv.pop(1)), int(sys.argv.pop(1))
ready, events = folder / "ready", folder / "events-0.jsonl"
train_step, build = training.train_step, training.build_train_valid_test_data_iterators


def patient_train_step(*args: Any, **kwargs: Any) -> Any:
    while get_args().curr_iteration + 1 == iteration - 1 and '"admitted"' not in events.read_text():
        time.sleep(0.01)
    while get_args().curr_iteration + 1 == iteration and not ready.exists():
        time.sleep(0.01)
    return train_step(*args, **kwargs)


def telling_build(*args: Any, **kwargs: Any) -> Any:
    result = build(*args, **kwargs)  # the last thing before the training
    ready.touch()
    return result


if os.environ.get("RECOVER_JOIN") == "1":
    training.build_train_valid_test_data_iterators = telling_build
elif os.environ["RANK"] == "0":
    # What --recover wraps is checked by its parameters: keep those of the original.
    patient_train_step.__wrapped__ = train_step  # type: ignore[attr-defined]
    training.train_step = patient_train_step
pretrain_gpt_recover.main()
