"""``--recover-on-event COMMAND``: a command of the user's for every event of a run, which nobody else waits for.

put --queue--> COMMAND, with the event as a JSON object on its stdin, one at a time
       |            '-- takes longer than ``SECONDS``: killed, with its whole process group
       '-- ``MOST`` wait: the event is dropped, and a line says so
"""

from __future__ import annotations

import json
import os
import queue
import shlex
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

SECONDS = 30.0
MOST = 1000


class EventHook:
    """Runs the command.  ``say``, in any thread, tells of what went wrong."""

    def __init__(self, command: str, say: Callable[[str], None], seconds: float = SECONDS) -> None:
        """``command``: words as a shell would split them; no shell runs them.  Raises ValueError for none."""
        self._words = shlex.split(command)
        if not self._words:
            raise ValueError("--recover-on-event names no command")
        self._say = say
        self._seconds = seconds
        self._events: queue.Queue[Mapping[str, Any] | None] = queue.Queue(MOST)
        self._thread = threading.Thread(target=self._run, daemon=True, name="recover-on-event")
        self._thread.start()

    def put(self, event: Mapping[str, Any]) -> None:
        """Have the command run for ``event``; returns at once."""
        try:
            self._events.put_nowait(event)
        except queue.Full:
            self._say(f"--recover-on-event: {MOST} events wait for the command; one of {event.get('event')} is dropped")

    def close(self, seconds: float) -> None:
        """No more events; wait for those that are left, ``seconds`` at most."""
        with suppress(queue.Full):
            self._events.put_nowait(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        while (event := self._events.get()) is not None:
            try:
                self._call(json.dumps(event).encode() + b"\n")
            except OSError as error:
                self._say(f"--recover-on-event: {self._words[0]} cannot be run: {error.strerror or error}")

    def _call(self, data: bytes) -> None:
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
            self._say(f"--recover-on-event: {self._words[0]} took longer than {self._seconds:g} s and was killed")
            return
        if process.returncode:
            self._say(f"--recover-on-event: {self._words[0]} ended with {process.returncode}")
