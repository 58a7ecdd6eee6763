"""events.jsonl: events of a run, one JSON object a line (schema: docs/reference/events.md).

    {"event": "plan", "time": 1700000000.123456, "worker": 3, "iteration": 7, "epoch": 2, "replicas": [0, 1, 3], ...}

Training workers write events.jsonl, the coordinators events-0.jsonl and events-1.jsonl, fault injection from outside
chaos.jsonl. All lines have ``event`` and ``time`` (unix seconds).

After a host lost its power a line may be a block of NUL bytes or half of a sector, and on a network file system two
writers' lines may be mixed. Readers leave such a spoiled line out (``line_objects``; ``Lines`` continues in any file).
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
    """Writes events; several processes may write to one file. A failing disk does not block them (``log_writer``)."""

    def __init__(self, path: Path) -> None:
        """Append to ``path``, which is opened, and its folder created, with the first event."""
        self._file = LogWriter(path, opening=self._open)

    def append(self, event: str, **fields: Any) -> None:
        """Add one line with the present time. It is on the disk on return, if the disk works.

        One write to a file opened for appending: lines of several writers on one host never mix. A writer that is
        killed leaves the complete line or nothing; rarely a part of it, which readers leave out.
        """
        record = {"event": event, "time": round(time.time(), 6), **fields}
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        if event == "start":
            self._file.head = line
        self._file.put(line)
        self._file.settle()

    def close(self) -> None:
        """Write the remaining events, as long as the disk accepts them, and accept no more events."""
        self._file.flush()
        self._file.close()

    def _open(self, path: Path) -> int:
        """Open the file to append to it; called in the writer's thread.

        A writer that replaces a lost one remembers the last ``start`` in the file, since after a log rotation no other
        writer can repeat that event. If the file cannot be read (no descriptor is left, it was moved), the event is
        written all the same.
        """
        descriptor = open_to_append(path)
        if not self._file.head and stat.S_ISREG(os.fstat(descriptor).st_mode):  # a pipe may have no end
            with suppress(OSError), open(path, "rb") as file:
                starts = [line for line in file if line.startswith(_START) and line_object(line)]
                self._file.head = self._file.head or b"".join(starts[-1:])
        return descriptor


def line_object(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object in ``line``, after any NUL bytes; None for a spoiled line."""
    try:
        value = json.loads(line[line.rfind(b"\0") + 1 :])
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def line_objects(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield the number and the JSON object of each line; None for a spoiled line. Raises OSError.

    A line with NUL bytes yields None, and then the object after them, if any. A last line without newline and NUL
    bytes is left out: it is being written, or was truncated. So is an empty line, which a writer may add.
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
    """Yield the events of a file, in its order; none if there is no such file.

    ``spoiled`` receives the place of each line that is left out because it is no event.
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
    """Return the events of a run's log folder: of workers, coordinators and chaos, each in order of time.

    An event of a coordinator gets the field ``file``, the name of its file. ``spoiled``: as in ``read_events``.
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
    """Reader of a file with one JSON object per line; each call continues after the last line read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        self._file: tuple[int, int] | None = None

    def new(self, upto: bytes = b"") -> tuple[bool, list[dict[str, Any]]]:
        """Return whether the file was replaced or truncated, and its new objects.

        ``upto``: parse only the part of each line before this text.
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
