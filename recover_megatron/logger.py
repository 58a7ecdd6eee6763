"""What a process says to people on stderr: Python's ``logging``, each message at once and with a prefix.

    log = get_logger(__name__)
    log.info("worker 3 waits for a place")      recover: worker 3 waits for a place
    log.warning("the disk is full")             recover: warning: the disk is full

The messages of one process are lines of their own also where several threads speak, and nothing of them is kept in a
buffer: a process may end by ``os._exit`` or a signal right after.  Where stderr cannot be written they are lost, and
the run goes on.  The package's logger passes nothing on to the root logger, whose level and handlers are Megatron's.
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
"""By the beginning of a logger's name."""
PREFIX = "recover: "
"""Of all others."""


class LineFormat:
    """How the lines of one process of a launch are written, on the console and in its log.

    plain   console: behind ``[id]``; log: as they came
    iso     2026-01-31T12:00:00.123Z node-0 worker 3: text, in both
    json    {"time": ..., "node": ..., "worker": 3, "stream": "stderr", "text": ...}, in both

    The time is when the launcher read the line, or a process beside it said it.
    """

    def __init__(self, kind: str, node: str, worker: str) -> None:
        self.plain = kind == "plain"
        self._json = kind == "json"
        self._node = node
        self._worker = worker

    def line(self, line: bytes, stream: str, now: float) -> bytes:
        """``line`` without its end, as it is to be written, without an end; ``now``: unix seconds.

        Of a message of several lines each has its time with iso; with json it is one object.
        """
        time_ = iso(now)
        if not self._json:
            head = f"{time_} {self._node} worker {self._worker}: ".encode()
            return head + line.replace(b"\n", b"\n" + head)
        worker = int(self._worker) if self._worker.isdecimal() else self._worker
        told = {"time": time_, "node": self._node, "worker": worker, "stream": stream}
        return json.dumps({**told, "text": line.decode(errors="backslashreplace")}).encode()


def iso(now: float) -> str:
    """ISO 8601, UTC, milliseconds, of unix seconds."""
    return datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def get_logger(name: str) -> logging.Logger:
    """The logger of the module ``name`` of this package."""
    package = logging.getLogger(PACKAGE)
    if not package.handlers:
        handler = StderrHandler()
        handler.setFormatter(Prefixed())
        package.addHandler(handler)
        package.setLevel(logging.INFO)
        package.propagate = False
    return logging.getLogger(name)


class Prefixed(logging.Formatter):
    """The message with the prefix of its logger, and the level from a warning on; as ``LINES_VARIABLE`` wants it."""

    def format(self, record: logging.LogRecord) -> str:
        """The text of ``record``, without a line end."""
        told = super().format(record)
        prefix = next((prefix for name, prefix in PREFIXES.items() if record.name.startswith(name)), PREFIX)
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        text = f"{prefix}{level}{told}"
        form = _own_lines or _inherited_lines()
        if form is None:
            return text
        return form.line(text.encode(errors="backslashreplace"), "stderr", record.created).decode()


_own_lines: LineFormat | None = None


def use_lines(kind: str, node: str) -> None:
    """Have this process's own messages written as ``kind`` from now on; its children do not inherit it."""
    global _own_lines
    _own_lines = None if kind == "plain" else LineFormat(kind, node, "-")


def _inherited_lines() -> LineFormat | None:
    kind, _, node = os.environ.get(LINES_VARIABLE, "").partition(" ")
    return LineFormat(kind, node, "-") if kind else None


class StderrHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        """Write ``record``; never raises for a stderr that is closed, full or broken."""
        write_stderr(self.format(record))


def write_stderr(text: str) -> None:
    """``text`` and a line end on stderr, at once; lost where it cannot be written."""
    data = f"{text}\n".encode(errors="backslashreplace")
    with contextlib.suppress(OSError, ValueError, AttributeError):
        try:
            descriptor = sys.stderr.fileno()
        except io.UnsupportedOperation:  # a stand-in without a descriptor
            sys.stderr.write(data.decode())
            sys.stderr.flush()
            return
        # Past Python's buffer: what that cannot write it keeps, and the interpreter ends with 120 for it.
        while data:
            data = data[os.write(descriptor, data) :]
