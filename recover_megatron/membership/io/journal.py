"""The coordinator's event log, for people: no decision depends on it."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from recover_megatron.log_writer import LogWriter, open_to_append
from recover_megatron.logger import get_logger
from recover_megatron.membership.records import Json

log = get_logger(__name__)

EventSink = Callable[[Mapping[str, Json]], None]

MOST_IN_A_PERIOD, PERIOD_SECONDS = 10, 10.0
"""Limit for events that unauthenticated peers cause: at most ``MOST_IN_A_PERIOD`` events of each kind are logged in
``PERIOD_SECONDS``. Further events are only counted, and their number is logged after the period."""


class Journal:
    """Event log for people: writes records to a file or stderr, one JSON object a line.

    Adds ``time`` (wall clock) and ``mono`` (monotonic), in seconds. A failing disk neither blocks nor terminates
    the caller (``log_writer``).
    """

    def __init__(self, path: Path | None = None) -> None:
        self._needed: dict[str, bytes] = {}
        """Kind of event -> its last line in the log, for the kinds that readers of the log need to find the run."""
        self._file = LogWriter(
            path or Path("/dev/stderr"),
            lambda text: log.warning(f"coordinator: {text}"),
            open_to_append if path is not None else lambda _: os.dup(sys.stderr.fileno()),
            gap=lambda lines: _line({"event": "dropped", "lines": lines}),
        )

    def __call__(self, record: Mapping[str, Json]) -> None:
        line = _line(record)
        if (event := str(record.get("event"))) in ("listening", "lead", "plan"):
            self._needed[event] = line
            self._file.head = b"".join(self._needed.values())
        self._file.put(line)

    def close(self) -> None:
        """Write the remaining lines, as long as the disk accepts them."""
        self._file.flush()
        self._file.close()


class LimitedLog:
    """Logs events that any peer can cause, at a limited rate: floods of connections must not fill the disk."""

    def __init__(self, log: EventSink) -> None:
        self._log = log
        self._periods: dict[str, tuple[float, int]] = {}
        """Kind of event -> start of its period, and number of events in the period."""

    def __call__(self, kind: str, **record: Json) -> None:
        now = time.monotonic()
        start, count = self._periods.get(kind, (now, 0))
        if now - start > PERIOD_SECONDS:
            if count > MOST_IN_A_PERIOD:
                self._log({"event": kind, "suppressed": count - MOST_IN_A_PERIOD})
            start, count = now, 0
        self._periods[kind] = (start, count + 1)
        if count < MOST_IN_A_PERIOD:
            self._log({"event": kind, **record})


def _line(record: Mapping[str, Json]) -> bytes:
    times = {"time": round(time.time(), 6), "mono": round(time.monotonic(), 6)}
    return (json.dumps({**times, **record}, separators=(",", ":")) + "\n").encode()
