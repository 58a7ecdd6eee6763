"""Whether the parameters of an orphan are those of the version that it counts.

On a GPU the host is ahead: an update is in the queue behind the norm of the gradients, an all-reduce inside the
replica.  If a mate is dead, that ends when its group is aborted, with garbage, by which the update is scaled; no
exception need come.  So the update counts only if the device had carried it out before anything was aborted:

    IDLE --begin--> UPDATING --end--> QUEUED --the device is done--> IDLE
      |                |                |
      '----seal()------+----seal()------'      the groups are about to be aborted
      |                |
    believed       not believed, until ``reset``

On the CPU an operation that fails raises before anything is computed from it: all is believed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch


class StepGuard:
    """``begin``, ``end``, ``reset``: by the main thread; ``seal``: by any.  ``event``: makes one of the device's, with
    ``record`` and ``query``; None: the device is the CPU.
    """

    def __init__(self, event: Callable[[], Any] | None) -> None:
        self._make_event = event
        self._lock = threading.Lock()
        self._updating = False
        self._event: Any = None
        self._sealed = False
        self._believed = True

    @classmethod
    def of(cls, device: torch.device) -> StepGuard:
        return cls(torch.cuda.Event if device.type == "cuda" else None)

    @property
    def believed(self) -> bool:
        return self._believed

    def begin(self) -> None:
        """The update of an iteration begins."""
        if self._make_event is None:
            return
        with self._lock:
            self._updating = True
            self._believed = self._believed and not self._sealed

    def end(self) -> None:
        """All of it is in the device's queue."""
        if self._make_event is None:
            return
        event = self._make_event()
        event.record()
        with self._lock:
            self._updating, self._event = False, event

    def seal(self) -> None:
        """The groups inside the replica are about to be aborted: what is not computed by now may become garbage."""
        with self._lock:
            if self._sealed:
                return
            self._sealed = True
            queued = self._event is not None and not self._event.query()
            self._believed = self._believed and not self._updating and not queued

    def reset(self) -> None:
        """The state is one that others have told of, or was found to be theirs: the worker has a place."""
        with self._lock:
            self._updating, self._event, self._sealed, self._believed = False, None, False, True
