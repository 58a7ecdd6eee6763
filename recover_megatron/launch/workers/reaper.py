"""The reaper: a small process that ends every process of the launch when the launcher is gone.

It holds one end of a connection whose other end is the launcher's alone.  However the launcher ends, by SIGKILL too,
the kernel closes it::

    WATCHING --end of file--> KILLING --none left--> exit
       `--"+PID" (with the pipes of its output), "-PID": a worker's session began, ended

It runs in a session of its own, so that neither Ctrl-C nor a kill of the launcher's group reaches it, and the
signals that ask a process to end are blocked from its first moment.  The launcher replaces a reaper that was killed.
When a worker has ended, and at the end of the launch, it removes the folders of sockets that multiprocessing has left.

It is the launcher's stand-in, too (``StandIn``), so that nobody waits in ``print`` for a launcher that is stopped
(Ctrl-Z, a debugger) or waits in the kernel: a pipe takes 64 KiB, and a process that writes more waits until it is read.
The reaper holds the reading ends, too, and says afterwards what it has dropped: "PID LINES"::

    the launcher beats --no new beat in MISSED looks--> what is more than a quarter of a pipe is read, and dropped
        ^                                                              |
        '------------------- a beat: how many lines were dropped ------'
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import struct
import termios
import time
from collections.abc import Callable, Iterator, Sequence

from recover_megatron.launch.workers.loop import EventLoop
from recover_megatron.launch.workers.processes import (
    DEAF_TO,
    Child,
    find_launch,
    kill_until_none_left,
    lead_session,
    open_pidfd,
    program,
    spawn_leader,
)
from recover_megatron.network.system import memory_file, remove_sockets

BEAT_SECONDS = 1.0
LOOK_SECONDS = 1.0
MISSED = 6
"""Looks of one's own count, and not seconds: both may have been kept from running."""
RELIEF_SECONDS = 0.05
_AT_ONCE = 4096


def beat(pulse: int) -> None:
    """The launcher runs now; ``pulse``: a memory file, since a pipe would fill up with beats that nobody reads."""
    os.pwrite(pulse, struct.pack("d", time.monotonic()), 0)


class StandIn:
    """The reaper's part: reads the workers' output while the launcher does not run.  ``pulse``: see ``beat``."""

    def __init__(self, pulse: int) -> None:
        self._pulse = pulse
        self._beat = b""
        self._missed = 0
        self._pipes: dict[int, Sequence[int]] = {}
        self._dropped: dict[int, int] = {}

    @property
    def sessions(self) -> set[int]:
        """Those that there are: each is a worker's."""
        return set(self._pipes)

    @property
    def pause(self) -> float:
        """Seconds until the next look."""
        return RELIEF_SECONDS if self._missed >= MISSED else LOOK_SECONDS

    def add(self, session: int, pipes: Sequence[int]) -> None:
        """The leader of ``session`` writes into these pipes; to read them does not block."""
        self._pipes[session] = pipes

    def remove(self, session: int) -> None:
        for pipe in self._pipes.pop(session, ()):
            os.close(pipe)

    def look(self) -> Iterator[tuple[int, int]]:
        """Read in the launcher's place if it does not run; once it does: the sessions of which lines were dropped."""
        beat = os.pread(self._pulse, 8, 0)
        self._missed, self._beat = self._missed + 1 if beat == self._beat else 0, beat
        if self._missed >= MISSED:
            for session, pipes in self._pipes.items():
                lines = sum(map(_relieve, pipes))
                self._dropped[session] = self._dropped.get(session, 0) + lines
        else:
            yield from ((session, lines) for session, lines in self._dropped.items() if lines)
            self._dropped = {}


def _relieve(pipe: int) -> int:
    """Read and drop what is oldest in ``pipe`` until three quarters are free; how many lines it was."""
    lines, most = 0, fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ) // 4
    while struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))[0] > most:
        try:
            lines += os.read(pipe, _AT_ONCE).count(b"\n")
        except BlockingIOError:
            break  # the launcher has read it just now
    return lines


AGAIN_SECONDS = 1.0


class Reaper:
    """The launcher's side: keeps one reaper running."""

    def __init__(self, loop: EventLoop, launch_id: str, say: Callable[[str], None]) -> None:
        """``say`` tells people of a reaper that was killed."""
        self._loop = loop
        self._launch_id = launch_id
        self._say = say
        self._sessions: dict[int, list[int]] = {}
        self._pulse = memory_file("recover-pulse")
        self.dropped: Callable[[int, int], None] = lambda session, lines: None
        """Called when the launcher runs again: so many lines of the worker that leads the session are missing."""
        self.pid = 0
        self._start()
        self._beat()

    @property
    def spared(self) -> tuple[int, int]:
        """The launcher and its reaper: what no search for the launch's processes may kill."""
        return os.getpid(), self.pid

    def add_session(self, session: int, pipes: Sequence[int]) -> None:
        """A worker leads ``session`` from now on; ``pipes``: where its output is read."""
        with contextlib.suppress(OSError):  # no descriptor is left: then nobody reads them in the launcher's place
            self._sessions[session] = []
            self._sessions[session] = [os.dup(pipe) for pipe in pipes]
        self._tell(f"+{session}", self._sessions[session])

    def remove_session(self, session: int) -> None:
        """``session`` is empty: its number may soon mean another one."""
        for pipe in self._sessions.pop(session, ()):
            os.close(pipe)
        self._tell(f"-{session}")

    def finish(self) -> None:
        """Have it kill what is left of the launch, and wait until it has ended."""
        self._hang_up()
        if self.pid:
            self._process.reap()

    def _start(self) -> None:
        """Raises OSError where it cannot be started."""
        self._channel, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # No variable of the launch: the reaper must not find itself.  Some Pythons find their library by the second.
        kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "TMPDIR") if name in os.environ}
        environment = {"PATH": os.defpath, **kept}
        try:
            pid = spawn_leader(
                program("recover_megatron.launch.workers.reaper", "-S"),
                environment,
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, its.fileno(), 0),
                    (os.POSIX_SPAWN_DUP2, self._pulse, 1),
                    (os.POSIX_SPAWN_DUP2, 2, 2),
                ],
                setsigmask=DEAF_TO,
            )
            pidfd = open_pidfd(pid)
        except OSError:
            self._channel.close()
            raise
        finally:
            its.close()
        self.pid = pid
        self._process = Child(self._loop, (pid, pidfd), self._on_death)
        self._loop.watch(self._channel.fileno(), self._hear)
        self._tell(self._launch_id)
        for session, pipes in self._sessions.items():
            self._tell(f"+{session}", pipes)

    def _tell(self, words: str, pipes: Sequence[int] = ()) -> None:
        """One that was killed is not told: its pidfd says so in a moment, and its successor is told everything.

        Nor is one that cannot be: it finds the workers by their environment, too.
        """
        with contextlib.suppress(OSError):
            socket.send_fds(self._channel, [words.encode()], pipes)

    def _hear(self) -> None:
        try:
            words = self._channel.recv(4096)
        except ConnectionResetError:
            words = b""
        if words:
            self.dropped(*map(int, words.split()))
        else:
            self._loop.unwatch(self._channel.fileno())  # its pidfd says so in a moment

    def _hang_up(self) -> None:
        with contextlib.suppress(KeyError, ValueError):  # it has done so itself, or there is none
            self._loop.unwatch(self._channel.fileno())
        self._channel.close()

    def _beat(self) -> None:
        beat(self._pulse)
        self._loop.call_later(BEAT_SECONDS, self._beat)

    def _on_death(self, status: int) -> None:
        self._hang_up()
        killed, self.pid = self.pid, 0
        self._replace(f"the reaper (pid {killed}) was killed")

    def _replace(self, why: str, told: bool = False) -> None:
        try:
            self._start()
        except OSError as error:
            if not told:
                self._say(f"{why}, and no other can be started now ({error.strerror}): it is tried again and again")
            self._loop.call_later(AGAIN_SECONDS, lambda: self._replace(why, told=True))
        else:
            self._say(f"{why}; a new one (pid {self.pid}) took its place")


def main() -> None:
    launcher = os.getppid()
    lead_session()
    # A shell's job table or a terminal must not wait for the reaper: after the launcher it holds nothing of theirs.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.chdir("/")
    launch_id, sessions = _watch()
    if launch_id:
        kill_until_none_left(
            lambda: find_launch(launch_id, sessions, spared=(os.getpid(), launcher)), timeout=float("inf")
        )
        remove_sockets(launch_id)


def _watch() -> tuple[str, set[int]]:
    """Read the launcher's lines until it is gone."""
    launch_id, stand_in = "", StandIn(pulse=1)
    channel = socket.socket(fileno=0)
    while True:
        try:
            if not select.select([channel], [], [], stand_in.pause)[0]:
                for session, lines in stand_in.look():
                    channel.send(f"{session} {lines}".encode())
                continue
            words, pipes, _, _ = socket.recv_fds(channel, 4096, 2)
        except ConnectionError:
            continue  # it is gone with words of ours unread; what it said before can be read, and then its end
        if not words:
            return launch_id, stand_in.sessions
        if not launch_id:
            launch_id = words.decode()
        elif words.startswith(b"+"):
            stand_in.add(int(words[1:]), pipes)
        else:
            stand_in.remove(int(words[1:]))
            remove_sockets(launch_id, int(words[1:]))
