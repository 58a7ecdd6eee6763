"""DIR/secret: the secret that a launch made up, where its owner's recover-status finds it.

Only a secret of the launch's own is written, never one that the user chose: that one is kept where the user keeps it.
The file has mode 0600 from its first byte on and takes its name when it is whole; a link of that name is replaced, not
followed.  It is removed at the end of the launch.  What a killed launcher leaves opens nothing, since the secret was
that launch's alone; the next launch removes it.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Callable
from pathlib import Path

from recover_megatron.log_writer import Aside
from recover_megatron.membership.auth import SECRET_FILE

_OURS = re.compile(rb"[0-9a-f]{64}\n")


class SecretFile:
    """The file of one launch.  The disk neither stops nor ends the launcher (``log_writer``)."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        """``say``, called in any thread, tells of trouble with the disk."""
        self._path = folder / SECRET_FILE
        self.writing = Aside(str(self._path), say)

    def write(self, secret: str) -> None:
        """Make the file.  It is there when this returns, if the disk is well."""
        self.writing.submit(lambda: _write(self._path, secret), 1)
        self.writing.settle()

    def remove(self) -> None:
        """Remove what a launch has left, this one or an earlier one."""
        self.writing.submit(lambda: _remove(self._path), 1)


def _write(path: Path, secret: str) -> None:
    if not _may_replace(path):
        raise FileExistsError(0, "there is a file of that name that no launch has made")
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            if os.fstat(descriptor).st_mode & 0o077:
                raise PermissionError(0, "this file system does not keep it from others")
            os.write(descriptor, secret.encode() + b"\n")
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _remove(path: Path) -> None:
    if _may_replace(path):
        path.unlink(missing_ok=True)


def _may_replace(path: Path) -> bool:
    """Whether ``path`` is what a launch has written, or a link, or nothing."""
    if path.is_symlink():
        return True
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        return _OURS.fullmatch(os.read(descriptor, 66)) is not None
    finally:
        os.close(descriptor)
