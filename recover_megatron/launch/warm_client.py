"""The launcher's side of a warm start: the parent process (warm.py) as a source of workers; and when not to use it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recover_megatron.arguments import device_from_argv
from recover_megatron.launch.channel import channel_pair, receive, send
from recover_megatron.launch.cold import WorkerEvents
from recover_megatron.launch.loop import EventLoop
from recover_megatron.launch.output import Stream
from recover_megatron.launch.plan import WORKER_ID_VARIABLE, LaunchPlan
from recover_megatron.launch.processes import spawn
from recover_megatron.launch.states import describe_end

_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv[1]); from recover_megatron.launch.warm import main; "
    "del sys.path[0]; main()"
)
_BLAS_THREADS = "OPENBLAS_NUM_THREADS"
_ROOM_FOR_ID = "#" * 10


def why_cold(script: str, script_args: Sequence[str], environ: Mapping[str, str], gpu_devices: bool) -> str:
    """Why a warm start is not possible for this command; empty if it is.

    ``gpu_devices``: whether this machine has any.  CUDA cannot be used in a process forked after its initialisation, so
    with a GPU workers always start cold.
    """
    if Path(script).is_dir():
        return "SCRIPT is a folder"
    device = device_from_argv(script_args)
    if device == "cuda":
        return "the script asks for --recover-device cuda"
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    hidden = visible is not None and visible.strip() in ("", "-1", "NoDevFiles")
    if device == "auto" and gpu_devices and not hidden:
        return (
            "this host has a GPU; --recover-device cpu, or CUDA_VISIBLE_DEVICES= for other scripts, says not to use it"
        )
    return ""


def has_gpu_devices() -> bool:
    """Whether this host has a GPU, from its device files."""
    return any(Path(path).exists() for path in ("/dev/nvidia0", "/proc/driver/nvidia/gpus", "/dev/kfd"))


@dataclass
class WarmEvents:
    """What the supervisor is told of the parent process."""

    ready: Callable[[], None]
    refused: Callable[[str], None]
    """It must not fork; the argument says why.  It has ended or will in a moment."""
    exited: Callable[[int, str], None]
    """The script ended it while it was loaded: exit code and message."""
    died: Callable[[str], None]
    """It ended, as the argument says, and all workers it forked with it."""


class WarmParent:
    """Made when the launch starts; takes over ``streams``, the process's output."""

    def __init__(
        self,
        loop: EventLoop,
        plan: LaunchPlan,
        environment: Mapping[str, str],
        stdout: int,
        stderr: int,
        streams: list[Stream],
        events: WarmEvents,
        worker_events: WorkerEvents,
    ) -> None:
        self._loop = loop
        self._streams = streams
        self._events = events
        self._worker_events = worker_events
        self._left_behind: dict[int, int] = {}
        self._reaping: dict[int, int] = {}
        self.alive = True
        """Whether the process has not been reaped yet."""
        self._listening = True
        self._concluded = False
        self._unset = {} if _BLAS_THREADS in environment else {_BLAS_THREADS: None}
        self._channel, other = channel_pair()
        interpreter, *rest = plan.command
        kind, script = ("module", rest[1:]) if rest[0] == "-m" else ("script", rest)
        with other:
            self.pid = spawn(
                [interpreter, "-c", _BOOT, _PACKAGE_ROOT, str(other.fileno()), kind, *script],
                {_BLAS_THREADS: "1", **environment, WORKER_ID_VARIABLE: _ROOM_FOR_ID},
                stdout,
                stderr,
                inherit=[other.fileno()],
                deaf=True,  # workers that it forks hear again
            )
        self._channel.setblocking(False)
        self._pidfd = os.pidfd_open(self.pid)
        loop.watch(self._channel.fileno(), self._on_messages)
        loop.watch(self._pidfd, self._on_end)

    def start(self, worker_id: int, variables: Mapping[str, str], stdout: int, stderr: int) -> None:
        order = {"order": "start", "worker_id": worker_id, "variables": {**variables, **self._unset}}
        send(self._channel, order, (stdout, stderr))

    def reap(self, worker_id: int, pid: int) -> None:
        self._left_behind[worker_id] = self._worker_events.kill_remains(worker_id, pid)
        self._reaping[worker_id] = pid
        if self.alive:
            try:
                send(self._channel, {"order": "reap", "worker_id": worker_id, "pid": pid})
            except (BrokenPipeError, ConnectionResetError):
                return  # it has ended, too: _on_end comes next and reaps in its place
        else:
            self._reap_orphan(worker_id)

    def finish(self) -> None:
        """End the process; no worker of it runs."""
        if self.alive:
            self._concluded = True
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            self._on_end()

    def _on_messages(self) -> None:
        while self._listening:  # a message may lead to finish()
            try:
                received = receive(self._channel)
            except BlockingIOError:
                return
            if received is None:
                self._stop_listening()
                return
            self._handle(*received)

    def _stop_listening(self) -> None:
        if self._listening:
            self._loop.unwatch(self._channel.fileno())
            self._listening = False

    def _handle(self, message: dict[str, Any], descriptors: list[int]) -> None:
        event = message["event"]
        if event == "started":
            self._worker_events.started(message["worker_id"], message["pid"], descriptors[0])
        elif event == "reaped":
            worker_id = message["worker_id"]
            del self._reaping[worker_id]
            self._worker_events.reaped(worker_id, message["status"], self._left_behind.pop(worker_id))
        elif event == "ready":
            self._events.ready()
        else:
            self._concluded = True
            for stream in self._streams:
                stream.drain_and_close()
            if event == "refused":
                self._events.refused(message["reason"])
            else:
                self._events.exited(message["code"], message["message"])

    def _on_end(self) -> None:
        """The process has ended; its children, by their parent-death signal, have ended or will in a moment."""
        self._on_messages()  # its last words may say why
        self._stop_listening()
        self._loop.unwatch(self._pidfd)
        _, status = os.waitpid(self.pid, 0)
        os.close(self._pidfd)
        self._channel.close()
        self.alive = False
        for stream in self._streams:
            stream.drain_and_close()
        for worker_id in list(self._reaping):
            self._reap_orphan(worker_id)
        if not self._concluded:
            code = os.waitstatus_to_exitcode(status)
            end = f"was killed by {describe_end(None, -code)}" if code < 0 else f"ended with {describe_end(code, None)}"
            self._events.died(end)

    def _reap_orphan(self, worker_id: int) -> None:
        """Reap a worker whose parent is gone: the launcher, as subreaper, has inherited it."""
        try:
            status = os.waitstatus_to_exitcode(os.waitpid(self._reaping.pop(worker_id), 0)[1])
        except ChildProcessError:
            status = -signal.SIGKILL  # the parent reaped it, and was killed before it could say how it ended
        self._worker_events.reaped(worker_id, status, self._left_behind.pop(worker_id))
