"""Folders of checkpoints: each attempt at one is written into a folder of its own, renamed when it is complete.

    SAVE/attempt_0000008_TERM_EPOCH_DECISION/...  --all have written-->  SAVE/iter_0000008/...  --> the tracker file

An attempt ends when a worker is lost, and the others begin another one.  A worker that was put out may still write, now
or when its host wakes hours later, into open files or by name: that reaches its own attempt only.  No attempt is ever
loaded: Megatron follows the tracker file to ``iter_``.  What attempts have left is removed when the next one begins.
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
"""What file systems say that cannot rename a folder, or none of so many files: then its files are copied."""


@dataclass(frozen=True)
class Attempt:
    """One try to write a checkpoint: in an epoch (with the term of its coordinator) there is one for each decision."""

    iteration: int
    term: int
    epoch: int
    decision: int

    def folder(self, final: str) -> str:
        """Where to write what is to be the folder ``final``."""
        name = f"attempt_{self.iteration:07d}_{self.term:x}_{self.epoch}_{self.decision}"
        return os.path.join(os.path.dirname(final), name)

    def follows(self, other: Attempt) -> bool:
        """Whether nobody needs what ``other`` has written any more when this one begins."""
        if self.iteration != other.iteration:
            return self.iteration > other.iteration
        return (self.term, self.epoch, self.decision) > (other.term, other.epoch, other.decision)


def publish(folder: str, final: str) -> None:
    """Rename a complete attempt to ``final``; what is there of an earlier one is replaced.

    A second or late call changes nothing: there is no attempt of that name any more.
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
    except FileNotFoundError:  # another one has published it meanwhile: it was that one, or one that it will replace
        if not os.path.isdir(final):
            _move(replaced, final)
            return
    discard(replaced)


def clean(parent: str, attempt: Attempt, keep: Collection[Attempt]) -> None:
    """Remove what attempts before this one have left in ``parent``, but for those in ``keep``."""
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
        if not os.path.isdir(folder):  # which is not asked first everywhere
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), folder) from error
        discard(final)
        shutil.copytree(folder, final, dirs_exist_ok=True)
        discard(folder)


def discard(path: str) -> None:
    """Remove it as far as possible: a worker that was put out may be writing there; the next attempt tries again."""
    if os.path.islink(path) or not os.path.isdir(path):
        with contextlib.suppress(OSError):
            os.unlink(path)
    else:
        shutil.rmtree(path, ignore_errors=True)
