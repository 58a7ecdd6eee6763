"""events.jsonl: what happened in a run, one JSON object a line (schema: docs/report.md).

    {"event": "plan", "time": 1700000000.123456, "worker": 3, "iteration": 7, "epoch": 2, "replicas": [0, 1, 3], ...}

Training workers write events.jsonl, the coordinators events-0.jsonl and events-1.jsonl, fault injection from outside
chaos.jsonl.  All have ``event`` and ``time`` (unix seconds).  ``Lines`` reads on in any file of JSON objects.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from recover_megatron.log_writer import LogWriter

EVENTS_FILE = "events.jsonl"
CHAOS_FILE = "chaos.jsonl"
COORDINATOR_FILES = "events-*.jsonl"

Event = dict[str, Any]


class EventsFile:
    """Writes events, as several processes may to one file; the disk neither stops nor ends them (``log_writer``)."""

    def __init__(self, path: Path) -> None:
        """``path`` is opened to add to it, and its folder made, with the first event."""
        self._file = LogWriter(path)

    def append(self, event: str, **fields: Any) -> None:
        """Add one line with the time of now.  It is on the disk then, if the disk is well.

        One write to a file opened for appending: lines of several writers on one host never mix, and a writer that is
        killed leaves the whole line or nothing.
        """
        told = {"event": event, "time": round(time.time(), 6), **fields}
        self._file.put(json.dumps(told, separators=(",", ":")).encode() + b"\n")
        self._file.settle()

    def close(self) -> None:
        """No more events; what is left is written as long as the disk takes it."""
        self._file.flush()
        self._file.close()


def read_events(path: Path) -> Iterator[Event]:
    """The events of a file, in its order; none if there is no such file.

    A line that is cut is left out: the last one, still being written or cut by a crash, and one at which the disk was
    full or its writer died and another wrote on.  Raises ValueError, naming the line, for one that is no event.
    """
    try:
        file = open(path, encoding="utf-8")  # noqa: SIM115  closed below
    except FileNotFoundError:
        return
    with file:
        for number, line in enumerate(file, 1):
            if not line.endswith("\n"):
                return
            try:
                event = json.loads(line)
            except ValueError:
                if line.startswith(("{", "\n")):  # what is empty ended a line that was not cut
                    continue
                event = None
            try:
                if not isinstance(event["event"], str) or not isinstance(event["time"], int | float):
                    raise TypeError("event is no name, or time no number")
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"{path}:{number}: no event: {line[:200]!r} ({error})") from None
            yield event


def read_run_events(folder: Path) -> tuple[list[Event], list[Event], list[Event]]:
    """The events of a run's log folder: the workers', the coordinators', the chaos; each in the order of time.

    Those of a coordinator get ``file``, the name of its file.  Raises ValueError for a line that is no event.
    """
    coordinators = [
        {**event, "file": path.name} for path in sorted(folder.glob(COORDINATOR_FILES)) for event in read_events(path)
    ]
    groups = list(read_events(folder / EVENTS_FILE)), coordinators, list(read_events(folder / CHAOS_FILE))
    for group in groups:
        group.sort(key=lambda event: event["time"])
    return groups


class Lines:
    """The JSON objects of a file with one on each line, from where it was read last."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        self._file: tuple[int, int] | None = None

    def new(self, upto: bytes = b"") -> tuple[bool, list[dict[str, Any]]]:
        """Whether the file has begun anew, and its new objects; ``upto``: of each line only what comes before this."""
        try:
            with open(self._path, "rb") as file:
                about = os.fstat(file.fileno())
                same = self._file == (about.st_dev, about.st_ino) and about.st_size >= self._at
                self._file, self._at = (about.st_dev, about.st_ino), self._at if same else 0
                file.seek(self._at)
                return not same, list(self._read(file, upto))
        except OSError:
            return False, []

    def _read(self, file: IO[bytes], upto: bytes) -> Iterator[dict[str, Any]]:
        for line in file:
            if not line.endswith(b"\n"):
                return
            self._at += len(line)
            head, found, _ = line.partition(upto) if upto else (line, b"", b"")
            try:
                value = json.loads(head + b"}" if found else line)
            except ValueError:
                continue
            if isinstance(value, dict):
                yield value
