"""The coordinator's event log: one JSON object per line, with a limit on what strangers can cause.

It is for people.  No decision is read from it: a coordinator that takes over learns all from what the members present.
"""

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

_STDERR = Path("/dev/stderr")


class Journal:
    """Writes records to a file or stderr, with ``time`` (wall clock) and ``mono`` (monotonic) in seconds added.

    The disk neither stops nor ends its caller (``log_writer``).
    """

    def __init__(self, path: Path | None = None) -> None:
        opening = _duplicate_stderr if path is None else open_to_append
        self._file = LogWriter(path or _STDERR, _say, opening, gap=_gap)

    def __call__(self, record: Mapping[str, Json]) -> None:
        """Write one record."""
        self._file.put(_line(record))

    def close(self) -> None:
        """Write what is left, as long as the disk takes it."""
        self._file.flush()
        self._file.close()


def _line(record: Mapping[str, Json]) -> bytes:
    times = {"time": round(time.time(), 6), "mono": round(time.monotonic(), 6)}
    return (json.dumps({**times, **record}, separators=(",", ":")) + "\n").encode()


def _gap(lines: int) -> bytes:
    return _line({"event": "dropped", "lines": lines})


def _duplicate_stderr(path: Path) -> int:
    return os.dup(sys.stderr.fileno())


def _say(text: str) -> None:
    log.warning(f"coordinator: {text}")


class Limited:
    """Lets through at most ``burst`` records of each kind per ``period`` seconds, and counts the rest.

    For what anybody who reaches the port can cause: a flood of bad connections must not fill the disk.
    """

    def __init__(self, sink: EventSink, burst: int = 10, period: float = 10.0) -> None:
        self._sink = sink
        self._burst = burst
        self._period = period
        self._windows: dict[str, tuple[float, int]] = {}

    def __call__(self, kind: str, record: Mapping[str, Json], now: float) -> None:
        """Log ``record`` as an event of ``kind``, unless there were too many lately."""
        start, count = self._windows.get(kind, (now, 0))
        if now - start > self._period:
            if count > self._burst:
                self._sink({"event": kind, "suppressed": count - self._burst})
            start, count = now, 0
        self._windows[kind] = (start, count + 1)
        if count < self._burst:
            self._sink({"event": kind, **record})
