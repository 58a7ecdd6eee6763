"""Fork servers: a process imports the modules of the workers once, and forks each worker that starts on its node.

::

    launcher                                    fork server
    ForkServer(environment): socket pair    --> imports the modules
    answer()                                <-- serve(): reports whether it may fork
    fork(descriptors)                       --> forks a prepared process, and sends its pid
    close(), or the launcher ends           --> exits with code 0

The forked process is a prepared process: it gets the rest of its environment from the launcher (``handover``).  It is a
child of the launcher, which must be a subreaper: the process that forks it exits at once, as a daemon's parent does.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

from recover_megatron.variables import PREPARED_VARIABLE

SECONDS = 5.0
"""Longest time in seconds that the launcher waits for a fork; meanwhile it handles nothing else."""
DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/infiniband")
"""Devices that a process and its parent must not share; their drivers do not support it."""
READY, FORK = b"ready", b"fork"
_PR_SET_PDEATHSIG = 1
_LARGEST = 1024


class ForkServer:
    """Launcher's end of the connection to a fork server."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Create the connection.  ``environment``: environment of the server.  Raises OSError."""
        self.channel, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel.settimeout(SECONDS)
        self.descriptor = end.detach()
        """End of the server, which it must inherit; the caller closes it after the start."""
        self.environment = {**environment, PREPARED_VARIABLE: str(self.descriptor)}

    def answer(self) -> str:
        """Return the server's next message.  Raises OSError if none comes within SECONDS, or if the server ended."""
        if not (message := self.channel.recv(_LARGEST)):
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        return message.decode(errors="replace")

    def fork(self, descriptors: Sequence[int]) -> int:
        """Fork a process with ``descriptors``: the pipe of its ``Handover``, its stdout and its stderr.

        Returns its pid.  Raises OSError if there is no such process.
        """
        socket.send_fds(self.channel, [FORK], descriptors)
        if (pid := int(self.answer())) < 0:
            raise OSError(-pid, os.strerror(-pid))
        return pid

    def close(self) -> None:
        """Make the server end.  Idempotent."""
        self.channel.close()


def is_server(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process has been started as a fork server."""
    return PREPARED_VARIABLE in environ and Path(f"/proc/self/fd/{environ[PREPARED_VARIABLE]}").is_socket()


def serve(environ: MutableMapping[str, str] = os.environ) -> None:
    """Fork a process for each request of the launcher, and return in each: it is a prepared process.

    Never returns in the server, which exits when the launcher closes the connection, or if ``obstacle`` finds a reason.
    """
    launcher, channel = os.getppid(), socket.socket(fileno=int(environ[PREPARED_VARIABLE]))
    why = obstacle(channel.fileno())
    channel.send(why.encode()[:_LARGEST] or READY)
    while not why:
        request, descriptors, _, _ = socket.recv_fds(channel, _LARGEST, 3)
        if not request:
            break
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        try:
            pid = _fork()
        except OSError as error:
            pid = -(error.errno or errno.EAGAIN)
        if pid == 0:
            channel.close()
            _begin(launcher, descriptors, environ)
            return
        for descriptor in descriptors:
            os.close(descriptor)
        channel.send(str(pid).encode())
    os._exit(0)


def obstacle(channel: int) -> str:
    """Return why this process must not fork workers; empty if it may.  ``channel``: its connection to the launcher.

    Connections that the launcher has, too, were not opened by the imports: srun gives one for PMI to each task.
    """
    if (between := os.fork()) == 0:
        os._exit(0)
    os.waitpid(between, 0)  # a thread pool that supports forks, as OpenBLAS's, has just ended, and starts when needed
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        return f"the imported modules have started {threads - 1} threads, which forked workers would lack"
    with contextlib.suppress(ChildProcessError):  # there is no child
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return "the imported modules have started a process, which forked workers would share"
    inherited = set(_open_files(os.getppid()).values())
    for descriptor, target in _open_files(os.getpid()).items():
        if target.startswith(DEVICES):
            return f"the imported modules have opened {target}, which workers cannot share"
        if target.startswith("socket:") and descriptor != channel and target not in inherited:
            return "the imported modules have opened a connection, which workers would share"
    return ""


def _open_files(pid: int) -> dict[int, str]:
    """Return descriptor -> name of its file or socket, of the process ``pid``; empty if the kernel does not tell."""
    found = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                found[int(name)] = os.readlink(f"/proc/{pid}/fd/{name}")
    return found


def _fork() -> int:
    """Fork a process whose parent becomes the nearest subreaper.  Return its pid; 0 in that process.

    Raises OSError if the kernel refuses.
    """
    reading, writing = os.pipe()
    try:
        if (between := os.fork()) == 0:
            between = os.getpid()
            os.setsid()  # the worker is at no time in the session of the server, which is killed with the server
            try:
                pid = os.fork()
            except OSError as error:
                os._exit(error.errno or errno.EAGAIN)
            if pid:
                os.write(writing, str(pid).encode())
                os._exit(0)
            while os.getppid() == between:  # it exits now
                time.sleep(0)
            return 0
        _, status = os.waitpid(between, 0)
        os.close(writing)
        writing = -1
        if answer := os.read(reading, _LARGEST):
            return int(answer)
        code = os.waitstatus_to_exitcode(status)
        raise OSError(code if code > 0 else errno.EAGAIN, "the worker cannot be forked")
    finally:
        os.close(reading)
        if writing >= 0:
            os.close(writing)


def _begin(launcher: int, descriptors: Sequence[int], environ: MutableMapping[str, str]) -> None:
    """Make this forked process a prepared process, as ``exec_worker`` does for a new process."""
    os.setsid()
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0 or os.getppid() != launcher:
        os._exit(1)
    pipe, *streams = descriptors
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream, number)
        os.close(stream)
    environ[PREPARED_VARIABLE] = str(pipe)
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()  # random draws of its own, as in a new process; Python's random does this itself
