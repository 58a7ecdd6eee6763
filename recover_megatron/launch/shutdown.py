"""The workers of one node are told to end, and made to.

::

    begin --SIGTERM--> they end by themselves --grace--> kill --SIGKILL--> --UNKILLABLE_SECONDS--> given up
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass

from recover_megatron.launch.loop import EventLoop
from recover_megatron.launch.worker_table import WorkerTable
from recover_megatron.membership.records import ranges

UNKILLABLE_SECONDS = 10.0


@dataclass(eq=False)
class Shutdown:
    """Made once per launch.  ``given_up``: called in the main thread when SIGKILL has had its time, whoever is left."""

    _loop: EventLoop
    _table: WorkerTable
    _say: Callable[[str], None]
    _given_up: Callable[[], None]

    def begin(self, grace: float, *, at_once: bool) -> None:
        """SIGTERM now, SIGKILL after ``grace`` seconds; ``at_once``: SIGKILL now, nothing of theirs is kept."""
        running = self._table.running
        if at_once:
            self._table.signal(running, signal.SIGKILL)
        self._loop.call_later(grace, self.kill)
        self._table.signal(running, signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to all who run."""
        running = self._table.running
        if running:
            ids = ranges([worker.worker_id for worker in running])
            self._say(f"SIGKILL to {'worker' if len(running) == 1 else 'workers'} {ids}")
        self._table.signal(running, signal.SIGKILL)
        self._loop.call_later(UNKILLABLE_SECONDS, self._given_up)
