"""A spare: a live worker without a place.  Its thread joins every epoch in its name, so that nobody waits for it.

    orphaned --> JOINING --plan--> IDLE --revoked--> JOINING ...
                    |                |
                    |                '--the run's end (all who worked have left, or it was stopped)--> over
                    '--too few replicas in the plan: gives up for all--------------------------------> over

The main thread may still be on its way out of the training, by the plan in which it had a place, or stuck for good.
"""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from recover_megatron.instep.errors import NoReplica
from recover_megatron.instep.plan import Status
from recover_megatron.membership.errors import EXIT_FENCED, EXIT_NO_REPLICA, CoordinatorLost, Fenced

if TYPE_CHECKING:
    from recover_megatron.instep.recovery import Recovery

LINGER_SECONDS = 10.0
"""How long a worker that is out of the run, or whose run has ended, waits for its main thread; then it just ends."""


class Spare:
    """``status``: what the worker joins with."""

    def __init__(self, recovery: Recovery, status: Status) -> None:
        self._recovery = recovery
        self._status = status
        self._code = 0
        self._because = ""
        self._arrived = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spare", daemon=True)

    def start(self) -> None:
        """Join from now on."""
        self._thread.start()

    def wait(self) -> tuple[int, str]:
        """In the main thread: wait for the end of the run; the exit code, and why."""
        self._arrived.set()
        self._over.wait()
        return self._code, self._because

    def _run(self) -> None:
        try:
            while self._take_part():
                pass
        except NoReplica as nobody:
            self._code, self._because = EXIT_NO_REPLICA, str(nobody)
        except CoordinatorLost as lost:
            self._code, self._because = lost.code, str(lost)
        except Fenced as fenced:
            self._code, self._because = EXIT_FENCED, str(fenced)
        self._over.set()
        if not self._arrived.wait(LINGER_SECONDS):
            os._exit(self._code)

    def _take_part(self) -> bool:
        """One epoch; False when the run is over."""
        recovery, session = self._recovery, self._recovery.session
        decision, _ = recovery.meet(self._status, f"replica {recovery.replica} is broken: {self._status.note}")
        # Should nobody else be left, the last words are this worker's: it remembers what the others told.
        self._status = replace(self._status, iteration=decision.iteration, checkpoint=decision.checkpoint)
        if not decision.replicas and session.left:
            session.leave()
            return False
        recovery.give_up_unless_enough(decision)
        session.idle()
        session.wait_revoked()
        return True
