"""A forked process closes what its parent holds open: the one at-fork hook of the run.

A worker's data loaders are forked from it. If they kept its connections, those would stay open after the worker's
death, and nobody would see an end. Sockets are closed, never shut down: that would reach the parent's connection.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from typing import Protocol


class Forked(Protocol):
    """What holds connections or threads that a forked process does not have or must not keep."""

    def close_in_child(self) -> None:
        """Called in a forked process, by its only thread. Closes descriptors; must not wait for a lock."""


_known: weakref.WeakKeyDictionary[Forked, threading.Condition | None] = weakref.WeakKeyDictionary()
_held: list[threading.Condition] = []


def close_in_children(owner: Forked, lock: threading.Condition | None = None) -> None:
    """Call ``owner.close_in_child`` in every process forked from now on, as long as ``owner`` lives.

    ``lock``: held while this process forks, so that ``owner`` is whole in the child. (It is the child's to replace.)
    """
    _known[owner] = lock


def forget(owner: Forked) -> None:
    """It is closed already. Harmless for one that is not known."""
    _known.pop(owner, None)


def _before_fork() -> None:
    for lock in list(_known.values()):
        if lock is not None:
            lock.acquire()
            _held.append(lock)


def _after_fork_in_parent() -> None:
    while _held:
        _held.pop().release()


def _after_fork_in_child() -> None:
    _held.clear()
    owners = list(_known)
    _known.clear()  # a child of this process closes what this one opens; who is reset, not closed, says so again
    for owner in owners:
        with contextlib.suppress(OSError):  # it was closed already: the others must be closed all the same
            owner.close_in_child()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
