"""The reaper: a small process that ends every process of the launch when the launcher is gone.

It holds the reading end of a pipe whose only writer is the launcher.  However the launcher ends, by SIGKILL too, the
kernel closes the pipe::

    WATCHING --end of file--> KILLING --none left--> exit
       `--"+PID", "-PID": a worker's session began, ended

It runs in a session of its own, so that neither Ctrl-C nor a kill of the launcher's group reaches it, and the
signals that ask a process to end are blocked from its first moment.  The launcher replaces a reaper that was killed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from recover_megatron.launch.loop import EventLoop
from recover_megatron.launch.processes import DEAF_TO, find_launch, kill_until_none_left

_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
_BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from recover_megatron.launch.reaper import main; main()"


class Reaper:
    """The launcher's side: keeps one reaper running."""

    def __init__(self, loop: EventLoop, launch_id: str, say: Callable[[str], None]) -> None:
        """``say`` tells people of a reaper that was killed."""
        self._loop = loop
        self._launch_id = launch_id
        self._say = say
        self._sessions: set[int] = set()
        self.pid = 0
        self._start()

    @property
    def spared(self) -> tuple[int, int]:
        """The launcher and its reaper: what no search for the launch's processes may kill."""
        return os.getpid(), self.pid

    def add_session(self, session: int) -> None:
        """A worker leads ``session`` from now on."""
        self._sessions.add(session)
        self._tell(f"+{session}\n")

    def remove_session(self, session: int) -> None:
        """``session`` is empty: its number may soon mean another one."""
        self._sessions.discard(session)
        self._tell(f"-{session}\n")

    def finish(self) -> None:
        """Have it kill what is left of the launch, and wait until it has ended."""
        self._loop.unwatch(self._pidfd)
        os.close(self._pipe)
        os.waitpid(self.pid, 0)
        os.close(self._pidfd)

    def _start(self) -> None:
        read, self._pipe = os.pipe()
        # No variable of the launch: the reaper must not find itself.
        environment = {"PATH": os.environ.get("PATH", os.defpath)}
        self.pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-I", "-S", "-c", _BOOT, _PACKAGE_ROOT],
            environment,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, read, 0),
                (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_DUP2, 2, 2),
            ],
            setsid=True,
            setsigmask=DEAF_TO,
        )
        os.close(read)
        self._pidfd = os.pidfd_open(self.pid)
        self._loop.watch(self._pidfd, self._on_death)
        self._tell(self._launch_id + "\n" + "".join(f"+{session}\n" for session in self._sessions))

    def _tell(self, line: str) -> None:
        try:
            os.write(self._pipe, line.encode())
        except BrokenPipeError:
            return  # it was killed: its pidfd says so in a moment, and its successor is told everything

    def _on_death(self) -> None:
        self._loop.unwatch(self._pidfd)
        os.waitpid(self.pid, 0)
        os.close(self._pidfd)
        os.close(self._pipe)
        killed = self.pid
        self._start()
        self._say(f"the reaper (pid {killed}) was killed; a new one (pid {self.pid}) took its place")


def main() -> None:
    """The process itself."""
    launcher = os.getppid()
    # A shell's job table or a terminal must not wait for the reaper: after the launcher it holds nothing of theirs.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.chdir("/")
    launch_id, sessions = _watch()
    if launch_id:
        kill_until_none_left(
            lambda: find_launch(launch_id, sessions, spared=(os.getpid(), launcher)), timeout=float("inf")
        )


def _watch() -> tuple[str, set[int]]:
    """Read the launcher's lines until it is gone."""
    launch_id = ""
    sessions: set[int] = set()
    with open(0, encoding="ascii") as lines:
        for line in lines:
            if not launch_id:
                launch_id = line.strip()
            elif line.startswith("+"):
                sessions.add(int(line[1:]))
            elif line.startswith("-"):
                sessions.discard(int(line[1:]))
    return launch_id, sessions


if __name__ == "__main__":
    main()
