"""The coordinator's event log: one JSON object per line, with a limit on what strangers can cause."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TextIO

from recover_megatron.membership.records import Json

EventSink = Callable[[Mapping[str, Json]], None]


class Journal:
    """Writes records to a file or stderr, with ``time`` (wall clock) and ``mono`` (monotonic) in seconds added."""

    def __init__(self, path: Path | None = None, stream: TextIO | None = None) -> None:
        self._stream = path.open("a", encoding="utf-8") if path is not None else (stream or sys.stderr)

    def __call__(self, record: Mapping[str, Json]) -> None:
        """Write one record."""
        line = {"time": round(time.time(), 6), "mono": round(time.monotonic(), 6), **record}
        self._stream.write(json.dumps(line, separators=(",", ":")) + "\n")
        self._stream.flush()


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
