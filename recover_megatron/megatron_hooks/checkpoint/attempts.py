"""Folders of checkpoints: each attempt to write a checkpoint has a separate folder, renamed when it is complete.

    SAVE/attempt_0000008_TERM_EPOCH_DECISION/...  --all parts written-->  SAVE/iter_0000008/...  --> the tracker file

If a worker is lost, the attempt ends and the survivors begin another attempt in another folder.  An evicted worker may
still write hours later, when its host wakes up, but only into the folder of the attempt that has ended.  Attempts are
never loaded, because the tracker file names an ``iter_`` folder.  The next attempt removes folders of ended attempts.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Collection
from dataclasses import dataclass

_NAME = re.compile(r"attempt_(\d{7,})_([0-9a-f]+)_(\d+)_(\d+)(\.replaced)?")

_NO_RENAMING = (errno.ENOTSUP, errno.ENOSYS, errno.EXDEV, errno.EPERM, errno.EMFILE, errno.ENFILE)
"""Errors of file systems that cannot rename a folder, or cannot if it has many files.  The files are then copied."""


@dataclass(frozen=True)
class Attempt:
    """Attempt to write a checkpoint, identified by iteration, coordinator's term, epoch and decision number."""

    iteration: int
    term: int
    epoch: int
    decision: int

    def folder(self, final: str) -> str:
        """Return the folder of this attempt, which will be renamed to ``final``."""
        name = f"attempt_{self.iteration:07d}_{self.term:x}_{self.epoch}_{self.decision}"
        return os.path.join(os.path.dirname(final), name)

    def follows(self, other: Attempt) -> bool:
        """Return whether the files of ``other`` are no longer needed when this attempt begins."""
        if self.iteration != other.iteration:
            return self.iteration > other.iteration
        return (self.term, self.epoch, self.decision) > (other.term, other.epoch, other.decision)


def publish(folder: str, final: str) -> None:
    """Rename the ``folder`` of a complete attempt to ``final``, replacing an earlier checkpoint.

    If another worker has already renamed ``folder``, the call changes nothing.
    """
    try:
        _move(folder, final)
        return
    except FileNotFoundError:
        if os.path.isdir(final):
            return
        raise
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
    replaced = f"{folder}.replaced"
    _move(final, replaced)
    try:
        _move(folder, final)
    except FileNotFoundError:  # another worker has renamed ``folder``, before or after the rename of ``final`` above
        if not os.path.isdir(final):
            _move(replaced, final)
            return
    discard(replaced)


def clean(parent: str, attempt: Attempt, keep: Collection[Attempt]) -> None:
    """Remove from ``parent`` the folders of all attempts that ``attempt`` follows, except the attempts ``keep``."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for name in sorted(os.listdir(parent)):
            if found := _NAME.fullmatch(name):
                iteration, term, epoch, decision, _ = found.groups()
                other = Attempt(int(iteration), int(term, 16), int(epoch), int(decision))
                if other not in keep and attempt.follows(other):
                    discard(os.path.join(parent, name))


def _move(folder: str, final: str) -> None:
    try:
        os.rename(folder, final)
    except OSError as error:
        if error.errno not in _NO_RENAMING:
            raise
        if not os.path.isdir(folder):  # some file systems report another error for a missing folder
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), folder) from error
        discard(final)
        shutil.copytree(folder, final, dirs_exist_ok=True)
        discard(folder)


def discard(path: str) -> None:
    """Remove ``path`` and ignore errors.  If an evicted worker then adds a file, the next attempt removes ``path``."""
    if os.path.islink(path) or not os.path.isdir(path):
        with contextlib.suppress(OSError):
            os.unlink(path)
    else:
        shutil.rmtree(path, ignore_errors=True)
