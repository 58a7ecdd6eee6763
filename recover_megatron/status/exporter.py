"""Process that exports a run's status to Prometheus or a node-exporter textfile, and its events to a user's command.

recover-run starts this process next to the coordinator if a flag asks for one of these exports, and notifies it through
a pipe when the launch ends. The process is an observer of the coordinator and reads the log folder, so it never delays
the training.

    every ``INTERVAL`` seconds  get the status and new events; serve metrics, write the textfile, call the command
    data in the pipe            export a last time, then exit

The process ignores signals, since they may be meant for the workers.  The command runs once for each event, and gets
the event as a JSON object on stdin.  After ``SECONDS`` the command is killed with its process group.  While ``MOST``
events are queued, further events are dropped; this is logged once until the queue is empty again.  A fault of the
command is logged unless it equals the fault of the previous call.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from recover_megatron.arguments import parse_addresses
from recover_megatron.logger import get_logger
from recover_megatron.membership.io.observer import NoAnswer
from recover_megatron.membership.records import AuthenticationError
from recover_megatron.membership.wire import find_secret
from recover_megatron.status.folder import History, ending, worker_processes
from recover_megatron.status.headline import headline
from recover_megatron.status.model import RunStatus
from recover_megatron.status.source import Watch

log = get_logger(__name__)

INTERVAL = 2.0
ANSWER_SECONDS = 2.0
SECONDS = 30.0
LAST_SECONDS = 3.0
"""Seconds that the exporter waits at most, after the end of the launch, until the command has received all events."""
MOST = 1000
UNTOLD = (
    "commit", "attached", "join", "spawned", "witness", "complaint", "listening", "unproved_closed",
)  # fmt: skip
"""Events for which the command is not called, since they occur in every run or very often."""


class EventHook:
    """Calls the user's command for queued events, in a thread.  ``say``: thread-safe function that logs a fault."""

    def __init__(self, command: str, say: Callable[[str], None], seconds: float = SECONDS) -> None:
        """``command``: split into words like a shell command, but run without a shell.  Raises ValueError if empty."""
        self._words = shlex.split(command)
        if not self._words:
            raise ValueError("--recover-on-event is empty: give a command")
        self._say = say
        self._seconds = seconds
        self._events: queue.Queue[Mapping[str, Any] | None] = queue.Queue(MOST)
        self._full = False
        self._complaint = ""
        self._thread = threading.Thread(target=self._run, daemon=True, name="recover-on-event")
        self._thread.start()

    def put(self, event: Mapping[str, Any]) -> None:
        """Queue ``event`` for the command; return without waiting."""
        if self._events.empty():
            self._full = False
        try:
            self._events.put_nowait(event)
        except queue.Full:
            if not self._full:
                self._say(
                    f"--recover-on-event: {MOST} events wait in the queue; new events are dropped while it is full"
                )
            self._full = True

    def close(self, seconds: float) -> None:
        """Wait at most ``seconds`` until the command has handled all queued events.  Do not call ``put`` later."""
        with suppress(queue.Full):
            self._events.put_nowait(None)
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._say(f"--recover-on-event: {self._words[0]} had not handled all events {seconds:g} s after the end")

    def _run(self) -> None:
        while (event := self._events.get()) is not None:
            try:
                complaint = self._call(json.dumps(event).encode() + b"\n")
            except OSError as error:
                complaint = f"could not be started: {error.strerror or error}"
            if complaint and complaint != self._complaint:
                self._say(f"--recover-on-event: {self._words[0]} {complaint}")
            self._complaint = complaint

    def _call(self, data: bytes) -> str:
        """Run the command; return its fault, or "" if it succeeded.  Raises OSError if it cannot be started."""
        process = subprocess.Popen(
            self._words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        try:
            process.communicate(data, self._seconds)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return f"took longer than {self._seconds:g} s and was killed"
        code = process.returncode
        return "" if code == 0 else f"exited with code {code}" if code > 0 else f"was killed by signal {-code}"


class Exporter:
    def __init__(self, args: argparse.Namespace) -> None:
        self._folder: Path = args.log_dir
        self._watch = Watch(parse_addresses(args.coordinators), find_secret(os.environ), ANSWER_SECONDS)
        self._history = History(self._folder)
        self._history.begin()
        self._hook = EventHook(args.on_event, log.warning) if args.on_event else None
        self._textfile: Path | None = args.textfile
        self._end_fd: int = args.end_fd
        self._collector: Any = None
        self._over: RunStatus | None = None
        self._word = ""
        self._complained = False
        if args.port or args.textfile:
            self._serve(args.host, args.port)

    def _serve(self, host: str, port: int) -> None:
        from prometheus_client import start_http_server

        from recover_megatron.status.metrics import RunCollector

        self._collector = RunCollector(self._history, str(self._folder))
        self._registry = self._collector.registry()
        if port:
            try:
                start_http_server(port, host, self._registry)
            except OSError as error:
                where = f"[{host}]" if ":" in host else host
                log.warning(f"--recover-metrics {where}:{port}: no metrics are served ({error.strerror or error})")

    def look(self, *, last: bool = False) -> None:
        """Export the status once.  ``last``: True after the launch's end: perhaps no coordinator answers any more."""
        status = self._status(last)
        self._history.read()
        if status is not None:
            training = self._history.training(self._history.now(status.commit_age))
            status = status.with_files(training, worker_processes(self._folder))
        if self._collector is not None:
            self._collector.put(status)
            self._write_textfile()
        if self._hook is not None:
            self._send_events(status)

    def close(self) -> None:
        self._watch.close()
        if self._hook is not None:
            self._hook.close(LAST_SECONDS)

    def _status(self, last: bool) -> RunStatus | None:
        if self._over is not None:
            return self._over  # a candidate that never led may still answer with an older state
        if last and (over := ending(self._folder) or self._launcher_end()) is not None:
            self._over = over
            return over
        try:
            status = self._watch.look()
        except (NoAnswer, AuthenticationError):
            return None
        self._over = status if status.code is not None else None
        return status

    def _launcher_end(self) -> RunStatus | None:
        """Return the end of the launch that the launcher has reported on the pipe; None if it has reported none."""
        how = json.loads(os.read(self._end_fd, 1 << 16) or "null")
        return how and RunStatus(str(self._folder), "stopped", code=how["code"], reason=how["reason"])

    def _write_textfile(self) -> None:
        if self._textfile is None:
            return
        from prometheus_client import generate_latest

        draft = Path(f"{self._textfile}.{os.getpid()}")
        try:
            draft.write_bytes(generate_latest(self._registry))
            with suppress(OSError):  # some file systems have no modes
                draft.chmod(0o644)  # node-exporter, which runs as another user, must be able to read the file
            draft.replace(self._textfile)
        except OSError as error:
            with suppress(OSError):
                draft.unlink()
            if not self._complained:
                self._complained = True
                log.warning(f"--recover-metrics-file {self._textfile} cannot be written ({error.strerror or error})")

    def _send_events(self, status: RunStatus | None) -> None:
        assert self._hook is not None
        for event in sorted(self._history.news, key=lambda event: event.get("time") or 0.0):
            if event.get("event") not in UNTOLD:
                self._hook.put(self._about(event))
        if status is not None and (head := headline(status)).word != self._word:
            before, self._word = self._word, head.word
            state = {"event": "state", "time": time.time(), "state": head.word, "before": before, "text": head.text}
            self._hook.put(self._about(state))

    def _about(self, event: Mapping[str, Any]) -> dict[str, Any]:
        return {"run": str(self._folder), **event}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="recover-exporter")
    parser.add_argument("--log-dir", type=Path, required=True)
    parser.add_argument("--coordinators", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--textfile", type=Path)
    parser.add_argument("--on-event", default="")
    parser.add_argument("--end-fd", type=int, required=True, help="pipe on which the launcher reports the end")
    for number in _SENT_TO_ALL:  # a handler instead of SIG_IGN, which the user's command would inherit
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    args = parser.parse_args(argv)
    exporter = Exporter(args)
    exporter.look()
    end = select.poll()  # select() refuses large descriptors, which a launcher with many workers has
    end.register(args.end_fd, select.POLLIN)
    while not end.poll(1000 * INTERVAL):
        exporter.look()
    exporter.look(last=True)
    exporter.close()
    return 0


_SENT_TO_ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals to ignore: SLURM, for example, sends them to all processes.  The launcher reports its end on the pipe."""


if __name__ == "__main__":
    sys.exit(main())
