"""A worker leaves the groups of its broken replica, or ends: one thread sees to it.

    begin --> ABORTING --every abort has returned--> AWAITING the main thread --left()--> over
                 |                                       |
                 |--one raises                           '--it has been in one call of a group for LEAVE_SECONDS
                 '--LEAVE_SECONDS are over                      |
                              '---------------------------------'--> the process ends, exit code 1

An abort may wait for a lock that a call of torch's holds, or for a kernel of another communicator of the device that is
aborted next: so the thread starts all of them at once, each in a thread of its own, and waits for all.  A main thread
that computes is waited for (as long as `spare` does).  Seconds are counted in looks, not by the clock: a process that
was stopped meanwhile has not used them.

The worker is an orphan: nobody waits for it, its state is held elsewhere, and its launcher may start another in its
place.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from recover_megatron.logger import get_logger, write_stderr

log = get_logger(__name__)

LEAVE_SECONDS = 10.0
EXIT_STUCK = 1
"""That of any fault of a worker's own: its launcher may start another one in its place."""
_LOOK = 0.25

_CALLS = (
    "/torch/distributed/distributed_c10d.py",
    "/torch/distributed/",
    "/torch/cuda/",
    "/recover_megatron/collectives/",
    "/recover_megatron/instep/device.py",
)
"""Where calls are that wait for a group or for the device: files of the frame that makes them."""


Calls = frozenset[tuple[int, int]]
"""Each is the same as long as a thread is in it."""


def calls_under_way() -> Calls:
    """The calls of groups, and for the device, in which the main thread is, or one that runs its backward pass."""
    main = threading.main_thread().ident
    return frozenset(
        (id(frame), frame.f_lasti)
        for thread, frame in sys._current_frames().items()
        if any(part in frame.f_code.co_filename for part in (_CALLS if thread == main else _CALLS[:1]))
    )


def end_process(reason: str) -> None:
    """End this worker now; where its main thread is goes to stderr."""
    main = sys._current_frames().get(threading.main_thread().ident or 0)
    write_stderr("".join(traceback.format_stack(main)))
    log.info(
        f"this worker cannot leave the groups of its broken replica within {LEAVE_SECONDS:g} s ({reason}); it ends, "
        "and its launcher starts another in its place if it may (--max-restarts)"
    )
    sys.stdout.flush()
    os._exit(EXIT_STUCK)


class Leaving:
    """``groups``: what is to be aborted, process groups of torch's.  ``where``, ``end`` and ``look`` (seconds between
    two looks): for tests.
    """

    def __init__(
        self,
        groups: Sequence[Any],
        *,
        where: Callable[[], Calls] = calls_under_way,
        end: Callable[[str], None] = end_process,
        look: float = _LOOK,
    ) -> None:
        self._groups = list(groups)
        self._where = where
        self._end = end
        self._look = look
        self._changed = threading.Condition()
        self._aborting = len(self._groups)
        self._failed = ""
        self._left = False
        self._thread = threading.Thread(target=self._run, name="leaving the replica's groups", daemon=True)

    def begin(self) -> None:
        """Abort all, from any thread, and return at once."""
        self._thread.start()

    def left(self) -> None:
        """The main thread is in no call of these groups any more, and makes none."""
        with self._changed:
            self._left = True
            self._changed.notify_all()

    def join(self) -> None:
        """Block until it is over."""
        self._thread.join()

    # ---- its thread

    def _run(self) -> None:
        for group in self._groups:
            abort = partial(self._abort, group)
            threading.Thread(target=abort, name="aborting a communicator of NCCL's", daemon=True).start()
        self._groups.clear()
        looks = round(LEAVE_SECONDS / _LOOK)
        for _ in range(looks):
            if self._wait(lambda: not self._aborting or bool(self._failed)):
                break
        if self._failed or self._aborting:
            self._end(self._failed or f"{self._aborting} of its communicators are still being aborted")
            return
        stuck, since = Calls(), 0
        while not self._wait(lambda: self._left):
            calls = self._where()
            stuck, since = (stuck & calls, since + 1) if stuck & calls else (calls, 0)
            if since >= looks:
                self._end("its main thread does not come out of a call")
                return

    def _wait(self, done: Callable[[], bool]) -> bool:
        with self._changed:
            return self._changed.wait_for(done, self._look)

    def _abort(self, group: Any) -> None:
        failed = ""
        try:
            group.abort()
        except BaseException as error:  # noqa: BLE001  whatever it is: what the communicator does now is not known
            failed = f"an abort failed: {type(error).__name__}: {error}"[:500]
        with self._changed:
            self._aborting -= 1
            self._failed = self._failed or failed
            self._changed.notify_all()
