"""Reaper: a small process that kills every process of the launch when the launcher is gone.

It holds one end of a connection; only the launcher holds the other end.  However the launcher ends, even by SIGKILL,
the kernel closes that end::

    WATCHING --end of file--> KILLING --none left--> exit
       `--"+PID" (with the pipes of its output), "-PID": a worker's session began, ended

The reaper runs in a separate session, so that neither Ctrl-C nor a kill of the launcher's group reaches it, and blocks
the signals that request termination from its first moment.  The launcher replaces a killed reaper.  When a worker has
ended, and at the end of the launch, it removes the socket folders that multiprocessing has left.

It is also the launcher's stand-in (``StandIn``), so that no worker blocks in ``print`` while the launcher is stopped
(Ctrl-Z, a debugger) or blocked in the kernel: a pipe takes 64 KiB, and a process that writes more waits for a reader.
The reaper also holds the reading ends, and reports afterwards how many lines it has dropped: "PID LINES"::

    the launcher beats --no new beat in MISSED looks--> a pipe is read down to a quarter, and the lines dropped
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
"""Number of looks, not seconds: the reaper may also have been stopped."""
RELIEF_SECONDS = 0.05
_AT_ONCE = 4096


def beat(pulse: int) -> None:
    """Record that the launcher runs now; ``pulse``: a memory file, because a pipe would fill up with unread beats."""
    os.pwrite(pulse, struct.pack("d", time.monotonic()), 0)


class StandIn:
    """Reader of the workers' output, in the reaper, while the launcher does not run.  ``pulse``: see ``beat``."""

    def __init__(self, pulse: int) -> None:
        self._pulse = pulse
        self._beat = b""
        self._missed = 0
        self._pipes: dict[int, Sequence[int]] = {}
        self._dropped: dict[int, int] = {}

    @property
    def sessions(self) -> set[int]:
        """Return the sessions, one for each worker."""
        return set(self._pipes)

    @property
    def pause(self) -> float:
        """Return the seconds until the next look."""
        return RELIEF_SECONDS if self._missed >= MISSED else LOOK_SECONDS

    def add(self, session: int, pipes: Sequence[int]) -> None:
        """Add the non-blocking pipes into which the leader of ``session`` writes."""
        self._pipes[session] = pipes

    def remove(self, session: int) -> None:
        for pipe in self._pipes.pop(session, ()):
            os.close(pipe)

    def look(self) -> Iterator[tuple[int, int]]:
        """Read in place of a launcher that does not run; once it runs again, yield the sessions and dropped lines."""
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
    """Read and drop the oldest data in ``pipe`` until three quarters are free; return the number of lines."""
    lines, most = 0, fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ) // 4
    while struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))[0] > most:
        try:
            lines += os.read(pipe, _AT_ONCE).count(b"\n")
        except BlockingIOError:
            break  # the launcher has read it just now
    return lines


AGAIN_SECONDS = 1.0


class Reaper:
    """Launcher's side: keeps one reaper running."""

    def __init__(self, loop: EventLoop, launch_id: str, say: Callable[[str], None]) -> None:
        """Start a reaper; ``say`` reports a reaper that was killed."""
        self._loop = loop
        self._launch_id = launch_id
        self._say = say
        self._sessions: dict[int, list[int]] = {}
        self._pulse = memory_file("recover-pulse")
        self.dropped: Callable[[int, int], None] = lambda session, lines: None
        """Callback, when the launcher runs again: session of a worker, number of its lines that are missing."""
        self.pid = 0
        self._start()
        self._beat()

    @property
    def spared(self) -> tuple[int, int]:
        """Return the pids of the launcher and its reaper, which no search for the launch's processes may kill."""
        return os.getpid(), self.pid

    def add_session(self, session: int, pipes: Sequence[int]) -> None:
        """Register the ``session`` of a worker; ``pipes``: the reading ends of its output."""
        with contextlib.suppress(OSError):  # no descriptor is left: then the stand-in cannot read them
            self._sessions[session] = []
            self._sessions[session] = [os.dup(pipe) for pipe in pipes]
        self._send(f"+{session}", self._sessions[session])

    def remove_session(self, session: int) -> None:
        """Remove ``session``, which is empty: its number may soon be reused."""
        for pipe in self._sessions.pop(session, ()):
            os.close(pipe)
        self._send(f"-{session}")

    def finish(self) -> None:
        """Make the reaper kill the rest of the launch, and wait until it has ended."""
        self._hang_up()
        if self.pid:
            self._process.reap()

    def _start(self) -> None:
        """Start a reaper and send it all sessions.  Raises OSError."""
        self._channel, reaper_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # No variable of the launch: the reaper must not find itself.  Some Pythons need LD_LIBRARY_PATH.
        kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "TMPDIR") if name in os.environ}
        environment = {"PATH": os.defpath, **kept}
        try:
            pid = spawn_leader(
                program("recover_megatron.launch.workers.reaper", "-S"),
                environment,
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, reaper_end.fileno(), 0),
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
            reaper_end.close()
        self.pid = pid
        self._process = Child(self._loop, (pid, pidfd), self._on_death)
        self._loop.watch(self._channel.fileno(), self._on_message)
        self._send(self._launch_id)
        for session, pipes in self._sessions.items():
            self._send(f"+{session}", pipes)

    def _send(self, message: str, pipes: Sequence[int] = ()) -> None:
        """Send ``message`` to the reaper, ignoring errors.

        If it was killed, its pidfd shows that soon, and its successor receives everything.  Otherwise it also finds the
        workers by their environment.
        """
        with contextlib.suppress(OSError):
            socket.send_fds(self._channel, [message.encode()], pipes)

    def _on_message(self) -> None:
        try:
            message = self._channel.recv(4096)
        except ConnectionResetError:
            message = b""
        if message:
            self.dropped(*map(int, message.split()))
        else:
            self._loop.unwatch(self._channel.fileno())  # its pidfd will report the death in a moment

    def _hang_up(self) -> None:
        with contextlib.suppress(KeyError, ValueError):  # the reaper was lost before, or does not exist
            self._loop.unwatch(self._channel.fileno())
        self._channel.close()

    def _beat(self) -> None:
        beat(self._pulse)
        self._loop.call_later(BEAT_SECONDS, self._beat)

    def _on_death(self, status: int) -> None:
        self._hang_up()
        killed, self.pid = self.pid, 0
        self._replace(f"the reaper (pid {killed}) was killed")

    def _replace(self, why: str, reported: bool = False) -> None:
        try:
            self._start()
        except OSError as error:
            if not reported:
                self._say(f"{why}, and no new one can be started now ({error.strerror}): trying again every second")
            self._loop.call_later(AGAIN_SECONDS, lambda: self._replace(why, reported=True))
        else:
            self._say(f"{why}; a new one (pid {self.pid}) took its place")


def main() -> None:
    launcher = os.getppid()
    lead_session()
    # A shell or a terminal must not wait for the reaper: after the launcher, it holds none of their descriptors.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.chdir("/")
    launch_id, sessions = _watch()
    if launch_id:
        kill_until_none_left(
            lambda: find_launch(launch_id, sessions, spared=(os.getpid(), launcher)), timeout=float("inf")
        )
        remove_sockets(launch_id)


def _watch() -> tuple[str, set[int]]:
    """Read the launcher's messages until it is gone; return the launch id and the sessions."""
    launch_id, stand_in = "", StandIn(pulse=1)
    channel = socket.socket(fileno=0)
    while True:
        try:
            if not select.select([channel], [], [], stand_in.pause)[0]:
                for session, lines in stand_in.look():
                    channel.send(f"{session} {lines}".encode())
                continue
            message, pipes, _, _ = socket.recv_fds(channel, 4096, 2)
        except ConnectionError:
            continue  # it is gone and left our messages unread; its earlier messages can still be read
        if not message:
            return launch_id, stand_in.sessions
        if not launch_id:
            launch_id = message.decode()
        elif message.startswith(b"+"):
            stand_in.add(int(message[1:]), pipes)
        else:
            stand_in.remove(int(message[1:]))
            remove_sockets(launch_id, int(message[1:]))
