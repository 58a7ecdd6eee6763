"""Log messages of a process on stderr: Python's ``logging``, each message at once and with a prefix.

    log = get_logger(__name__)
    log.info("worker 3 waits for a place")      recover: worker 3 waits for a place
    log.warning("the disk is full")             recover: warning: the disk is full

Messages of several threads of a process never share a line.  No message stays in a buffer, because the process may end
by ``os._exit`` or a signal right after it.  If stderr cannot be written, messages are lost and the run continues.  The
package's logger does not propagate to the root logger, whose level and handlers Megatron sets.
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
"""Prefixes of messages, by the beginning of the logger's name."""
PREFIX = "recover: "
"""Prefix of all other loggers."""


class LineFormat:
    """Format of the lines of one process of a launch, on the console and in its log.

    plain   console: after the prefix ``[id]``; log: unchanged
    iso     2026-01-31T12:00:00.123Z node-0 worker 3: text, in both
    json    {"time": ..., "node": ..., "worker": 3, "stream": "stderr", "text": ...}, in both

    The time is when the launcher read the line, or when a process next to the workers logged it.
    """

    def __init__(self, kind: str, node: str, worker: str) -> None:
        self.plain = kind == "plain"
        self._json = kind == "json"
        self._node = node
        self._worker = worker

    def line(self, line: bytes, stream: str, now: float) -> bytes:
        """Return ``line`` in this format; both texts have no line end.  ``now``: unix seconds.

        With iso, each line of a message of several lines has its time; with json, the message is one object.
        """
        time_ = iso(now)
        if not self._json:
            head = f"{time_} {self._node} worker {self._worker}: ".encode()
            return head + line.replace(b"\n", b"\n" + head)
        worker = int(self._worker) if self._worker.isdecimal() else self._worker
        fields = {"time": time_, "node": self._node, "worker": worker, "stream": stream}
        return json.dumps({**fields, "text": line.decode(errors="backslashreplace")}).encode()


def iso(now: float) -> str:
    """Return unix seconds as ISO 8601, UTC, in milliseconds."""
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
    """Formatter that adds the logger's prefix and, from WARNING on, the level; ``LINES_VARIABLE`` sets the form."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of ``record``, without a line end."""
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
    """Write this process's messages as ``kind`` from now on; its children do not inherit the format."""
    global _own_lines
    _own_lines = None if kind == "plain" else LineFormat(kind, node, "-")


def _inherited_lines() -> LineFormat | None:
    kind, _, node = os.environ.get(LINES_VARIABLE, "").partition(" ")
    return LineFormat(kind, node, "-") if kind else None


class StderrHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        """Write ``record``; raise nothing if stderr is closed, full or broken."""
        write_stderr(self.format(record))


def write_stderr(text: str) -> None:
    """Write ``text`` and a line end to stderr, at once; if stderr cannot be written, the text is lost."""
    data = f"{text}\n".encode(errors="backslashreplace")
    with contextlib.suppress(OSError, ValueError, AttributeError):
        try:
            descriptor = sys.stderr.fileno()
        except io.UnsupportedOperation:  # stderr was replaced by an object without a descriptor
            sys.stderr.write(data.decode())
            sys.stderr.flush()
            return
        # Bypass Python's buffer: it would keep data that it cannot write, and the interpreter would exit with 120.
        while data:
            data = data[os.write(descriptor, data) :]
