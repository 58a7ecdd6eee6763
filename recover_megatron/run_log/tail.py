"""Reading a file of lines without reading all of it: on from where it was read last, or at its end.

The functions find their way in steps.jsonl, whose lines are in the order of their iterations.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

_BLOCK = 1 << 16


class Lines:
    """The JSON objects of a file with one on each line, from where it was read last."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        self._file: tuple[int, int] | None = None

    def new(self, upto: bytes = b"") -> tuple[bool, list[dict[str, Any]]]:
        """Whether the file has begun anew, and its new objects.

        ``upto``: read of each line what comes before this, as a whole object.
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
            head, found, _ = line.partition(upto) if upto else (line, b"", b"")
            try:
                value = json.loads(head + b"}" if found else line)
            except ValueError:
                continue
            if isinstance(value, dict):
                yield value


def whole(descriptor: int) -> int:
    """Where the last whole line ends.  Raises OSError."""
    return _before(descriptor, os.fstat(descriptor).st_size)


def cut_and_read_last(descriptor: int) -> int:
    """Cut off a last line without its end; the iteration of the last one then, 0 if there is none.  Raises OSError."""
    end = whole(descriptor)
    if end < os.fstat(descriptor).st_size:
        os.ftruncate(descriptor, end)
    return read_last(descriptor)


def read_last(descriptor: int) -> int:
    """The iteration of the last whole line, 0 if there is none.  Raises OSError."""
    return last_field(descriptor, "iteration")


def last_field(descriptor: int, name: str) -> int:
    """A number of the last whole line, 0 if there is none.  Raises OSError."""
    end = whole(descriptor)
    while end:
        start = _before(descriptor, end - 1)
        if (found := _number(_read(descriptor, start, end), name)) is not None:
            return found
        end = start  # a line that was spoiled: the one before it tells
    return 0


def first_at_least(descriptor: int, iteration: int) -> int:
    """Where the first line begins that has ``iteration`` or a later one; the end of the last whole line if none has.

    Looks at a logarithm of the lines.  Raises OSError.
    """
    low, high = 0, whole(descriptor)  # both are beginnings of lines, or the end
    while low < high:
        start = _before(descriptor, (low + high) // 2)
        end = _after(descriptor, start, high)
        found = _number(_read(descriptor, start, end), "iteration")
        if found is not None and found >= iteration:
            high = start
        else:
            low = end
    return low


def begin_anew(path: Path, descriptor: int, end: int) -> int:
    """Keep the file as path.1, path.2, ...; a new one has its first ``end`` bytes.  Its descriptor; raises OSError."""
    temporary = path.with_name(f"{path.name}.tmp")
    other = os.open(temporary, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        offset = 0
        while offset < end and (block := os.pread(descriptor, min(16 * _BLOCK, end - offset), offset)):
            offset += len(block)
            while block:
                block = block[os.write(other, block) :]
        number = 1
        while (old := path.with_name(f"{path.name}.{number}")).exists():
            number += 1
        try:
            os.link(path, old)  # so that there is a steps.jsonl at any time
        except OSError:
            os.rename(path, old)
        os.replace(temporary, path)
    except OSError:
        os.close(other)
        raise
    return other


def _before(descriptor: int, offset: int) -> int:
    """Where the line begins that ``offset`` is in: after the last line end before ``offset``, or at 0."""
    while offset > 0:
        start = max(0, offset - _BLOCK)
        found = _read(descriptor, start, offset).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        offset = start
    return 0


def _after(descriptor: int, offset: int, end: int) -> int:
    """Behind the first line end from ``offset`` on, or ``end``."""
    while offset < end:
        block = _read(descriptor, offset, min(end, offset + _BLOCK))
        found = block.find(b"\n")
        if found >= 0:
            return offset + found + 1
        if not block:
            break
        offset += len(block)
    return end


def _read(descriptor: int, start: int, end: int) -> bytes:
    data = b""
    while len(data) < end - start and (block := os.pread(descriptor, end - start - len(data), start + len(data))):
        data += block
    return data


def _number(line: bytes, name: str) -> int | None:
    try:
        return int(json.loads(line)[name])
    except (ValueError, TypeError, KeyError):
        return None
