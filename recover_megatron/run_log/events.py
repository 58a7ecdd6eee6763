"""events.jsonl: events of a run, one JSON object per line (schema: docs/reference/events.md).

    {"event": "plan", "time": 1700000000.123456, "worker": 3, "iteration": 7, "epoch": 2, "replicas": [0, 1, 3], ...}

Training workers write events.jsonl; the coordinators write events-0.jsonl and events-1.jsonl; the command
``recover_megatron.chaos`` writes chaos.jsonl. All lines have ``event`` and ``time`` (unix seconds).

A *spoiled* line is no JSON object. After a host has lost its power, a line may be incomplete or a block of NUL bytes;
on a network file system, lines of two writers may be mixed. Readers skip spoiled lines (``line_objects``, ``Lines``).
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from recover_megatron.log_writer import LogWriter, open_to_append

EVENTS_FILE = "events.jsonl"
CHAOS_FILE = "chaos.jsonl"
COORDINATOR_FILES = "events-*.jsonl"
_START = b'{"event":"start",'

Event = dict[str, Any]


class EventsFile:
    """Writer of events; several processes may write to one file. A failing disk does not block it (``log_writer``)."""

    def __init__(self, path: Path) -> None:
        """Append to the file ``path``; the first event creates the file's folder and opens the file."""
        self._file = LogWriter(path, opening=self._open)

    def append(self, event: str, **fields: Any) -> None:
        """Write one line, with the present time. If the disk works, the line is in the file when this returns.

        A line is one write to a file opened for appending, so lines of several writers on one host never mix. If this
        process is killed during the write, a part of the line may remain; readers skip it.
        """
        record = {"event": event, "time": round(time.time(), 6), **fields}
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        if event == "start":
            self._file.head = line
        self._file.put(line)
        self._file.wait_done()

    def close(self) -> None:
        """Write the events that are not in the file yet, if the disk accepts them; then close the file."""
        self._file.flush()
        self._file.close()

    def _open(self, path: Path) -> int:
        """Open the file for appending; called in the writer's thread.

        If this writer replaces a lost writer, it reads the file's last ``start`` event, so that it can repeat this
        event after a log rotation. If the file cannot be read (no free descriptor, or it was moved), events are written
        all the same, but this event is not repeated.
        """
        descriptor = open_to_append(path)
        if not self._file.head and stat.S_ISREG(os.fstat(descriptor).st_mode):  # reading a pipe may block forever
            with suppress(OSError), open(path, "rb") as file:
                starts = [line for line in file if line.startswith(_START) and line_object(line)]
                self._file.head = self._file.head or b"".join(starts[-1:])
        return descriptor


def line_object(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object in ``line`` (or in the part after the last NUL byte); None if there is none."""
    try:
        value = json.loads(line[line.rfind(b"\0") + 1 :])
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def line_objects(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield (line number, JSON object) for each line; (line number, None) for a spoiled line. Raises OSError.

    For a line with NUL bytes, yields None, and then the object after the NUL bytes, if any. Skips empty lines, which a
    writer may add, and a last line without newline or NUL bytes, which is being written or was truncated.
    """
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            complete = line.endswith(b"\n")
            found = line_object(line) if complete else None
            if (found is None and complete and line != b"\n") or b"\0" in line:
                yield number, None
            if found is not None:
                yield number, found


def read_events(path: Path, spoiled: list[str] | None = None) -> Iterator[Event]:
    """Yield the events of a file, in its order; no events if the file does not exist.

    Skips lines that are no events, and appends the text "file name:line number" for each to ``spoiled``.
    """
    try:
        for number, event in line_objects(path):
            if event is not None and isinstance(event.get("event"), str) and isinstance(event.get("time"), int | float):
                yield event
            elif spoiled is not None:
                spoiled.append(f"{path.name}:{number}")
    except FileNotFoundError:
        return


def read_run_events(folder: Path, spoiled: list[str] | None = None) -> tuple[list[Event], list[Event], list[Event]]:
    """Return the events of the workers, the coordinators and chaos in a run's log folder: three lists sorted by time.

    Adds the field ``file``, the file's name, to the events of coordinators. ``spoiled``: as in ``read_events``.
    """
    coordinators = [
        {**event, "file": path.name}
        for path in sorted(folder.glob(COORDINATOR_FILES))
        for event in read_events(path, spoiled)
    ]
    groups = (
        list(read_events(folder / EVENTS_FILE, spoiled)),
        coordinators,
        list(read_events(folder / CHAOS_FILE, spoiled)),
    )
    for group in groups:
        group.sort(key=lambda event: event["time"])
    return groups


class Lines:
    """Reader of a growing file with one JSON object per line; each call of ``new`` continues after the last line read.

    Skips spoiled lines.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        self._file: tuple[int, int] | None = None

    def new(self, upto: bytes = b"") -> tuple[bool, list[dict[str, Any]]]:
        """Return whether the file was replaced or truncated since the last call, and the JSON objects of new lines.

        The first value is true when the file is read for the first time, too. Whenever it is true, all lines are new.
        If the file cannot be read, returns False and no objects. ``upto``: cut each line off before this text, and
        close the JSON object there.
        """
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
            head, separator, _ = line.partition(upto) if upto else (line, b"", b"")
            if (value := line_object(head + b"}" if separator else line)) is not None:
                yield value
