"""Reaper: a small process that kills every process of the launch when the launcher has ended.

The reaper holds one end of a connection; only the launcher holds the other end.  In whatever way the launcher ends,
even by SIGKILL, the kernel closes the launcher's end::

    WATCHING --end of file--> KILLING --no process is left--> exit
       `--message "+PID", with the pipes of a worker's output: the worker's session began; "-PID": it ended

The reaper runs in a separate session, so that neither Ctrl-C nor a kill of the launcher's group reaches it, and from
its first moment blocks the signals that request termination.  The launcher replaces a killed reaper.  When a worker has
ended, and at the end of the launch, the reaper removes the socket folders that multiprocessing has left.

The reaper also reads the workers' output in place of a launcher that is stopped (Ctrl-Z, a debugger) or blocked in the
kernel (``StandIn``): a pipe buffers 64 KiB, and a worker that prints more would block.  For that, the reaper also holds
the reading ends of the pipes.  A running launcher *beats*: every BEAT_SECONDS, it writes the time into a memory file.
When the launcher runs again, the reaper sends the number of dropped lines, as "PID LINES"::

    the launcher beats --no new beat in MISSED checks--> pipes are read until three quarters are free, lines dropped
        ^                                                                   |
        '------------- a new beat: the number of dropped lines is reported -'
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
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

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
from recover_megatron.network.event_loop import EventLoop
from recover_megatron.network.system import memory_file, remove_sockets

BEAT_SECONDS = 1.0
LOOK_SECONDS = 1.0
MISSED = 6
"""Number of checks without a new beat after which the launcher counts as stopped.  A number of seconds would
mislead, because the reaper may have been stopped, too."""
RELIEF_SECONDS = 0.05
_AT_ONCE = 4096


def beat(pulse: int) -> None:
    """Record that the launcher runs now, in the memory file ``pulse``; a pipe would fill up with unread beats."""
    os.pwrite(pulse, struct.pack("d", time.monotonic()), 0)


class StandIn:
    """Part of the reaper that reads the workers' output while the launcher does not run.  ``pulse``: see ``beat``."""

    def __init__(self, pulse: int) -> None:
        self._pulse = pulse
        self._beat = b""
        self._missed = 0
        self._pipes: dict[int, Sequence[int]] = {}
        self._dropped: Counter[int] = Counter()

    @property
    def sessions(self) -> set[int]:
        """Return the sessions that were added and not removed; the id of a session is the pid of its worker."""
        return set(self._pipes)

    @property
    def pause(self) -> float:
        """Return the seconds until the next call of ``look``."""
        return RELIEF_SECONDS if self._missed >= MISSED else LOOK_SECONDS

    def add(self, session: int, pipes: Sequence[int]) -> None:
        """Add the non-blocking pipes into which the leader of ``session`` writes."""
        self._pipes[session] = pipes

    def remove(self, session: int) -> None:
        for pipe in self._pipes.pop(session, ()):
            os.close(pipe)

    def look(self) -> Iterator[tuple[int, int]]:
        """Check for a new beat; if the launcher does not run, read the workers' pipes and drop the lines.

        Once the launcher runs again, yield (session, number of dropped lines) for each session that has lost lines.
        """
        beat = os.pread(self._pulse, 8, 0)
        self._missed, self._beat = self._missed + 1 if beat == self._beat else 0, beat
        if self._missed >= MISSED:
            for session, pipes in self._pipes.items():
                self._dropped[session] += sum(map(_relieve, pipes))
        else:
            yield from (+self._dropped).items()
            self._dropped.clear()


def _relieve(pipe: int) -> int:
    """Read and drop the oldest data in ``pipe`` until three quarters are free; return the number of lines."""
    lines, most = 0, fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ) // 4
    while struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))[0] > most:
        try:
            lines += os.read(pipe, _AT_ONCE).count(b"\n")
        except BlockingIOError:
            break  # the launcher has just read the data
    return lines


AGAIN_SECONDS = 1.0


class Reaper:
    """Launcher's handle of the reaper: starts it, replaces it if it is killed, and sends it the workers' sessions."""

    def __init__(self, loop: EventLoop, launch_id: str, say: Callable[[str], None]) -> None:
        """Start the first reaper; ``say`` is called with a log line whenever a reaper was killed."""
        self._loop = loop
        self._launch_id = launch_id
        self._say = say
        self._sessions: dict[int, list[int]] = {}
        self._pulse = memory_file("recover-pulse")
        self.dropped: Callable[[int, int], None] = lambda session, lines: None
        """Callback for dropped lines, called when the launcher runs again; arguments: session, number of lines."""
        self.pid = 0
        self._start()
        self._beat()

    @property
    def spared(self) -> tuple[int, int]:
        """Return the pids of the launcher and its reaper, which must not be killed with the launch's processes."""
        return os.getpid(), self.pid

    def add_session(self, session: int, pipes: Sequence[int]) -> None:
        """Register the ``session`` of a worker; ``pipes``: the reading ends of its output."""
        with contextlib.suppress(OSError):  # no descriptor is free: the reaper will not read these pipes
            self._sessions[session] = []
            self._sessions[session] = [os.dup(pipe) for pipe in pipes]
        self._send(f"+{session}", self._sessions[session])

    def remove_session(self, session: int) -> None:
        """Remove ``session``: no process is left in it, so the system may reuse its id."""
        for pipe in self._sessions.pop(session, ()):
            os.close(pipe)
        self._send(f"-{session}")

    def finish(self) -> None:
        """Make the reaper kill the remaining processes of the launch, and wait until the reaper has ended."""
        self._hang_up()
        if self.pid:
            self._process.reap()

    def _start(self) -> None:
        """Start a reaper and send it all sessions.  Raises OSError if it cannot be started."""
        self._channel, reaper_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # The reaper must not have the launch id, or it would kill itself.  Some builds of Python need LD_LIBRARY_PATH.
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
        self._loop.add_reader(self._channel, self._on_message)
        self._send(self._launch_id)
        for session, pipes in self._sessions.items():
            self._send(f"+{session}", pipes)

    def _send(self, message: str, pipes: Sequence[int] = ()) -> None:
        """Send ``message`` and ``pipes`` to the reaper; ignore errors.

        If the reaper was killed, its pidfd soon shows that, and the next reaper receives all sessions.  If the message
        is lost for another reason, the reaper still finds the workers by their environment.
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
            self._loop.remove_reader(self._channel)  # the reaper has ended, as its pidfd will report

    def _hang_up(self) -> None:
        with contextlib.suppress(ValueError):  # the channel is closed
            self._loop.remove_reader(self._channel)
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
            self._loop.call_later(AGAIN_SECONDS, self._replace, why, True)
        else:
            self._say(f"{why}; a new one (pid {self.pid}) took its place")


def main() -> None:
    launcher = os.getppid()
    lead_session()
    # The reaper may live longer than the launcher: no shell or terminal must wait until the reaper closes stderr.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.chdir("/")
    launch_id, sessions = _watch()
    if launch_id:
        kill_until_none_left(
            lambda: find_launch(launch_id, sessions, spared=(os.getpid(), launcher)), timeout=float("inf")
        )
        remove_sockets(launch_id)


def _watch() -> tuple[str, set[int]]:
    """Read the launcher's messages until the launcher has ended; return the launch id and the sessions."""
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
            continue  # the launcher has ended; its remaining messages can still be read
        if not message:
            return launch_id, stand_in.sessions
        if not launch_id:
            launch_id = message.decode()
        elif message.startswith(b"+"):
            stand_in.add(int(message[1:]), pipes)
        else:
            stand_in.remove(int(message[1:]))
            remove_sockets(launch_id, int(message[1:]))
