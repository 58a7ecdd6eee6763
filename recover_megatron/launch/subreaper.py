"""Descendants of the launcher that lost their parent: they become its children, to be reaped, and killed at the end."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from functools import partial

from recover_megatron.launch.processes import (
    Process,
    become_subreaper,
    find_launch,
    has_children,
    kill_until_none_left,
)

LAST_SWEEP_SECONDS = 10.0


class Subreaper:
    """Make it before anything is started.  Raises OSError where the kernel refuses."""

    def __init__(self) -> None:
        # Children from before (of a shell that became recover-run by exec) are none of ours; once there are any, an
        # orphan that we inherit might be theirs.
        self._owns_all_children = not has_children()
        become_subreaper()
        self.due = False
        """Whether there may be inherited children to reap."""

    def reap(self, watched: set[int]) -> None:
        """Reap the inherited children that have ended; ``watched``: pids of children that others reap."""
        self.due = False
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            if ended.si_pid in watched:
                self.due = True  # it hides other zombies; once it is reaped, after its event, look again
                return
            # A library may start processes of its own in another thread (torch's import does), and reap them first.
            with contextlib.suppress(ChildProcessError):
                os.waitpid(ended.si_pid, 0)

    def kill_all(self, launch_id: str, spared: Iterable[int]) -> list[Process]:
        """Kill every process of the launch.  Returns those that are there after LAST_SWEEP_SECONDS all the same."""
        parent = os.getpid() if self._owns_all_children else None
        return kill_until_none_left(partial(find_launch, launch_id, (), spared, parent), timeout=LAST_SWEEP_SECONDS)
