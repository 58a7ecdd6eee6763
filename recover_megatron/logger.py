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
import logging
import os
import sys

PACKAGE = "recover_megatron"
PREFIXES = {f"{PACKAGE}.hostdevice": "[hostdevice] ", f"{PACKAGE}.launch": "recover-run: "}
"""By the beginning of a logger's name."""
PREFIX = "recover: "
"""Of all others."""


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
    """The message with the prefix of its logger, and the level from a warning on."""

    def format(self, record: logging.LogRecord) -> str:
        """The text of ``record``, without a line end."""
        told = super().format(record)
        prefix = next((prefix for name, prefix in PREFIXES.items() if record.name.startswith(name)), PREFIX)
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        return f"{prefix}{level}{told}"


class StderrHandler(logging.Handler):
    """Writes to the present ``sys.stderr``."""

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
