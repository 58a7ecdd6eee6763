"""How much longer than on an idle machine things may take: one factor for every limit of the tests.

``RECOVER_TEST_PATIENCE`` says it; without it the first process of a run measures, once, what part of the processors it
is given, and all others take its number.  Two kinds of limits are multiplied by it:

* what ends a test that hangs: such a limit is generous anyway, and nothing waits for it where all goes well;
* a timeout of the product that a test sets shorter than a run has it (heartbeat, hang, lost): with half of a processor
  a healthy worker says something half as often.

The product itself knows nothing of this factor.  What a test waits for is an event, never a number of seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import time

MEASURED_SECONDS = 0.3
MOST = 4.0


def _spin(seconds: float, given: multiprocessing.SimpleQueue[float]) -> None:
    begun, before = time.monotonic(), time.process_time()
    while time.monotonic() - begun < seconds:
        pass
    given.put((time.process_time() - before) / (time.monotonic() - begun))


def measured() -> float:
    """1 where processes that compute, one a processor, are given all of it; 2 where they are given half; ``MOST`` at
    most."""
    context = multiprocessing.get_context("fork")
    given: multiprocessing.SimpleQueue[float] = context.SimpleQueue()
    count = len(os.sched_getaffinity(0))
    spinning = [context.Process(target=_spin, args=(MEASURED_SECONDS, given)) for _ in range(count)]
    for process in spinning:
        process.start()
    shares = [given.get() for _ in spinning]
    for process in spinning:
        process.join()
    return round(min(MOST, max(1.0, count / sum(shares))), 1)


def _patience() -> float:
    said = os.environ.get("RECOVER_TEST_PATIENCE")
    factor = float(said) if said else measured()
    os.environ["RECOVER_TEST_PATIENCE"] = f"{factor:g}"  # for pytest-xdist's processes, and what tests start
    return factor


PATIENCE = _patience()


def patient(seconds: float) -> float:
    """``seconds`` of an idle machine on this one, now."""
    return seconds * PATIENCE
