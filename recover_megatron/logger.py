"""Log messages of a process, written to stderr by Python's ``logging`` with a prefix.

    log = get_logger(__name__)
    log.info("worker 3 waits for a place")      recover: worker 3 waits for a place
    log.warning("the disk is full")             recover: warning: the disk is full

Messages of several threads never share a line.  Messages are not buffered, because the process may end immediately
afterwards, by ``os._exit`` or a signal.  If stderr cannot be written, messages are lost and the run continues.  The
package's logger does not propagate to the root logger, because Megatron sets the root logger's level and handlers.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import sys
from datetime import UTC, datetime

from recover_megatron.variables import LINES_VARIABLE

PACKAGE = "recover_megatron"
PREFIXES = {f"{PACKAGE}.hostdevice": "[hostdevice] ", f"{PACKAGE}.launch": "recover-run: "}
"""Beginning of a logger's name -> prefix of its messages."""
PREFIX = "recover: "
"""Prefix of the messages of all loggers that are not in ``PREFIXES``."""


class LineFormat:
    """Format of the lines that one process of a launch prints, on the console and in the process's log file.

    plain   on the console with the prefix ``[id]``; in the log file unchanged
    iso     2026-01-31T12:00:00.123Z node-0 worker 3: text
    json    {"time": ..., "node": ..., "worker": 3, "stream": "stderr", "text": ...}; a fork server is "imports"

    The time of a worker's line is when the launcher read it; other processes write the time of the log message.
    """

    def __init__(self, kind: str, node: str, worker: str) -> None:
        self.plain = kind == "plain"
        self._json = kind == "json"
        self._node = node
        self._worker = worker

    def line(self, line: bytes, stream: str, now: float) -> bytes:
        """Return ``line``, which has no newline at its end, in the format iso or json.

        ``now``: unix seconds.  A message of several lines is one object in json; in iso each line of the message begins
        with the time.
        """
        time_ = iso(now)
        if not self._json:
            head = f"{time_} {self._node} worker {self._worker}: ".encode()
            return head + line.replace(b"\n", b"\n" + head)
        worker = int(self._worker) if self._worker.isdecimal() else self._worker
        fields = {"time": time_, "node": self._node, "worker": worker, "stream": stream}
        return json.dumps({**fields, "text": line.decode(errors="backslashreplace")}).encode()


def iso(now: float) -> str:
    """Return ``now``, in unix seconds, as ISO 8601 text in UTC with milliseconds."""
    return datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def get_logger(name: str) -> logging.Logger:
    """Return the logger of the module ``name`` of this package."""
    package = logging.getLogger(PACKAGE)
    if not package.handlers:
        handler = StderrHandler()
        handler.setFormatter(Prefixed())
        package.addHandler(handler)
        package.setLevel(logging.INFO)
        package.propagate = False
    return logging.getLogger(name)


class Prefixed(logging.Formatter):
    """Formatter that adds the logger's prefix, and the level of warnings and errors.

    Uses the ``LineFormat`` that ``use_lines`` or the environment variable ``LINES_VARIABLE`` selects.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of ``record``, without a newline at its end."""
        fields = super().format(record)
        prefix = next((prefix for name, prefix in PREFIXES.items() if record.name.startswith(name)), PREFIX)
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        text = f"{prefix}{level}{fields}"
        form = _own_lines or _inherited_lines()
        if form is None:
            return text
        return form.line(text.encode(errors="backslashreplace"), "stderr", record.created).decode()


_own_lines: LineFormat | None = None


def use_lines(kind: str, node: str) -> None:
    """Select the format ``kind`` (plain, iso, json) for this process's messages; child processes do not inherit it."""
    global _own_lines
    _own_lines = None if kind == "plain" else LineFormat(kind, node, "-")


def _inherited_lines() -> LineFormat | None:
    kind, _, node = os.environ.get(LINES_VARIABLE, "").partition(" ")
    return LineFormat(kind, node, "-") if kind else None


class StderrHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        """Write ``record`` to stderr; raise no error if stderr is closed, full or broken."""
        write_stderr(self.format(record))


def write_stderr(text: str) -> None:
    """Write ``text`` and a newline to stderr without buffering; if stderr cannot be written, the text is lost."""
    data = f"{text}\n".encode(errors="backslashreplace")
    with contextlib.suppress(OSError, ValueError, AttributeError):
        try:
            descriptor = sys.stderr.fileno()
        except io.UnsupportedOperation:  # stderr was replaced by an object without a descriptor
            sys.stderr.write(data.decode())
            sys.stderr.flush()
            return
        # Bypass Python's buffer: if it keeps data that cannot be written, the interpreter exits with code 120.
        while data:
            data = data[os.write(descriptor, data) :]
