"""The process that watches a run for others: Prometheus, node-exporter's textfile, a command for events.

recover-run starts it beside the coordinator where a flag asks for any of it, and ends it (SIGTERM) with the launch. It
asks the coordinator as an observer and reads the log folder, so the training knows nothing of it and never waits.

    every ``INTERVAL``:  look, read --> registry (served by HTTP), textfile (replaced), events (to the command)
    SIGTERM:             the same once more, then the end
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recover_megatron.arguments import parse_addresses
from recover_megatron.logger import get_logger
from recover_megatron.membership.auth import find_secret
from recover_megatron.membership.errors import AuthenticationError
from recover_megatron.membership.observer import NoAnswer
from recover_megatron.status.event_hook import EventHook
from recover_megatron.status.folder import ending
from recover_megatron.status.headline import headline
from recover_megatron.status.history import History, worker_processes
from recover_megatron.status.model import RunStatus
from recover_megatron.status.watch import Watch

log = get_logger(__name__)

INTERVAL = 2.0
ANSWER_SECONDS = 2.0
LAST_SECONDS = 3.0
"""How long, at the end, the command may take for the events that are left."""
UNTOLD = ("commit", "attached", "join", "spawned", "witness", "complaint", "listening")
"""Events of every run and every second, of which the command is not told."""


class Exporter:
    """``look`` again and again."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._folder: Path = args.log_dir
        self._watch = Watch(parse_addresses(args.coordinators), find_secret(os.environ), ANSWER_SECONDS)
        self._history = History(self._folder)
        self._history.read()  # what was there before is no news
        self._hook = EventHook(args.on_event, log.warning) if args.on_event else None
        self._textfile: Path | None = args.textfile
        self._collector: Any = None
        self._over: RunStatus | None = None
        self._word = ""
        self._told = False
        if args.port or args.textfile:
            self._serve(args.host, args.port)

    def _serve(self, host: str, port: int) -> None:
        from prometheus_client import start_http_server

        from recover_megatron.status.metrics import RunCollector

        self._collector = RunCollector(self._history)
        self._registry = self._collector.registry()
        if port:
            try:
                start_http_server(port, host, self._registry)
            except OSError as error:
                log.warning(f"--recover-metrics {port}: no metrics are served ({error.strerror or error})")

    def look(self, *, last: bool = False) -> None:
        """Once; ``last``: the run may have ended, and its coordinator with it."""
        status = self._status(last)
        self._history.read()
        if status is not None:
            training = self._history.training(time.time())
            status = status.with_files(training, worker_processes(self._folder))
        if self._collector is not None:
            self._collector.put(status)
            self._write_textfile()
        if self._hook is not None:
            self._tell(status)

    def close(self) -> None:
        """No more looks."""
        self._watch.close()
        if self._hook is not None:
            self._hook.close(LAST_SECONDS)

    def _status(self, last: bool) -> RunStatus | None:
        if self._over is not None:
            return self._over  # a candidate that does not lead may be left, and knows nothing of it
        if last and (over := ending(self._folder)) is not None:
            self._over = over
            return over
        try:
            status = self._watch.look()
        except (NoAnswer, AuthenticationError):
            return None
        self._over = status if status.code is not None else None
        return status

    def _write_textfile(self) -> None:
        if self._textfile is None:
            return
        from prometheus_client import write_to_textfile

        try:
            write_to_textfile(str(self._textfile), self._registry)
        except OSError as error:
            if not self._told:
                self._told = True
                log.warning(f"--recover-metrics-file {self._textfile} cannot be written ({error.strerror or error})")

    def _tell(self, status: RunStatus | None) -> None:
        assert self._hook is not None
        for event in self._history.news:
            if event.get("event") not in UNTOLD:
                self._hook.put(self._about(event))
        if status is not None and (head := headline(status)).word != self._word:
            before, self._word = self._word, head.word
            state = {"event": "state", "time": time.time(), "state": head.word, "before": before, "text": head.text}
            self._hook.put(self._about(state))

    def _about(self, event: Mapping[str, Any]) -> dict[str, Any]:
        return {"run": str(self._folder), **event}


def main(argv: Sequence[str] | None = None) -> int:
    """The process; ends with 0 on SIGTERM."""
    parser = argparse.ArgumentParser(prog="recover-exporter")
    parser.add_argument("--log-dir", type=Path, required=True)
    parser.add_argument("--coordinators", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--textfile", type=Path)
    parser.add_argument("--on-event", default="")
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # for the workers: SLURM sends them to every process of a step
        signal.signal(number, signal.SIG_IGN)
    exporter = Exporter(parser.parse_args(argv))
    while not ended.is_set():
        exporter.look()
        ended.wait(INTERVAL)
    exporter.look(last=True)
    exporter.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
