"""Decides what caused an exception: a model-parallel peer, this worker's host or device, or the training code.

cause        meaning                                         test, and what the worker does
peer         an operation on a group of this replica failed  ``is_in_a_group`` if a peer is lost, otherwise
                                                             ``is_communication``; the worker becomes an orphan
own host     this host or device has a fault                 ``is_own``; the worker exits, the run continues
CUDA context CUDA has failed in this process                 ``is_of_device``; the worker exits soon, even if it is
                                                             an orphan or a call hangs (``exit_soon``)
any other    this worker or the training code is at fault    no test; the worker exits and reports ``signature``; the
                                                             coordinator ends the run if another replica reports the
                                                             same error in the same work, or two report other errors

An ``InStepError`` makes a worker leave the training before its end.
"""

from __future__ import annotations

import errno
import os
import platform
import re
import threading
import traceback
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist

from recover_megatron.collectives.device import DeviceStuck, drained, within
from recover_megatron.errors import EXIT_OWN_FAULT, Disagreement, InStepError
from recover_megatron.logger import get_logger
from recover_megatron.membership.records import EXIT_NO_REPLICA, EXIT_STATE_LOST

log = get_logger(__name__)

EXIT_REFUSED = 2
"""Exit code of a worker whose flags are wrong, or differ from those of the run; no worker is started in its place."""


class Orphaned(InStepError):
    """Raised when this worker loses its place, usually because another worker of its replica is lost.

    This worker then leaves the training and waits for a place.
    """


class NoReplica(InStepError):
    """Raised if no complete replica is left, or fewer than --recover-min-replicas: the run ends with exit code 10."""

    code = EXIT_NO_REPLICA


class WrongGradients(Disagreement):
    """Raised after a forward and backward pass if the gradients that this worker has added to the buckets are not those
    of its microbatches."""


class StateLost(InStepError):
    """Raised if enough workers for a replica live, but some state of the training is lost: exit code 12."""

    code = EXIT_STATE_LOST


class RunOver(InStepError):
    """Raised when a worker without a place must exit, with ``code``; the exception's text is the reason."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class Drained(RunOver):
    """Raised when this worker has left the run because its node is drained: exit code 0.  The run continues."""

    def __init__(self, node: str) -> None:
        super().__init__(0, f"node {node} is drained")


class OtherFlags(RunOver):
    """Raised if this worker's flags or program differ from those of the run: exit code 2.  The run continues."""

    def __init__(self, reason: str) -> None:
        super().__init__(EXIT_REFUSED, reason)


class OtherPosition(InStepError):
    """Raised if the plan needs this spare in another ``position``.

    The spare must build the model of this position, then wait again.
    """

    def __init__(self, position: int) -> None:
        super().__init__(f"the run wants this worker in position {position}")
        self.position = position


class Spoiled(ValueError):
    """Raised if no live worker has an intact copy of a snapshot part."""


class CheckpointFailed(InStepError):
    """Raised if a checkpoint cannot be written.

    ``own``: True if only this worker is at fault.  ``to_folder``: True if the checkpoint's folder cannot be written;
    then the message is enough, so the traceback is not printed by default.
    """

    def __init__(self, message: str, *, own: bool, to_folder: bool = False) -> None:
        super().__init__(message)
        self.own, self.to_folder = own, to_folder


class UnknownOperation(InStepError):
    """Raised if code calls an operation over replicas, and the recovery can neither replace it nor carry it out: exit
    code 1."""


_SIGNS = (
    "gloo/transport",
    "NCCL error",
    "ncclRemoteError",
    "ncclSystemError",
    "NCCL communicator was aborted",
)
"""Texts of communication errors that torch and gloo raise as plain RuntimeErrors."""

_COMMON_SIGNS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed")
"""Texts that also occur in errors of other libraries.  An error with such a text is a communication error only if an
operation on a group raised it."""

_IN_A_GROUP = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/c10d_logger.py",
    "recover_megatron/collectives/",
    "recover_megatron/instep/groups/process_group.py",
    "recover_megatron/instep/groups/traffic.py",
)
"""Parts of the paths of source files that carry out operations on groups."""

_IN_THE_DATA = ("torch/utils/data/", "recover_megatron/megatron_hooks/data/source.py")
"""Parts of the paths of source files that read samples.  Connection errors there come from a data store, not from a
worker."""

_FULL_NUMBERS = (errno.ENOSPC, errno.EDQUOT)
DISK_QUOTA = "Disk quota exceeded"
_FULL_SIGNS = ("No space left on device", DISK_QUOTA)
_FULL_BYTES = 1 << 16
"""Free bytes below which a file system counts as full, since torch's archive writer does not report why it failed."""

_FILE_NUMBERS = (errno.EIO, errno.EFBIG, errno.EROFS, errno.ESTALE)
"""Error numbers of failed operations on open files; an OSError with such a number does not contain the file's name."""
_ARCHIVE = "PytorchStreamWriter failed"
"""Text of errors of torch's archive writer; such an error does not contain the file's name."""

_OWN_NUMBERS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, *_FULL_NUMBERS)

_OWN_SIGNS = (
    "Too many open files",
    "Cannot allocate memory",
    *_FULL_SIGNS,
    "items of ancdata",  # from torch, if a process cannot open file descriptors that were sent to it
    "insufficient shared memory",
    "uncorrectable ECC",
    "uncorrectable NVLink",
    "over nvlink or a hardware error",
    "hardware stack error",
    "system not yet initialized",
    "no CUDA-capable device",
    "CUDA-capable device(s) is/are busy or unavailable",
)
"""Texts of errors of a worker's host or device: full tables, disks or memory of the host, and failed devices.

Full device memory is not listed, since the training code may need too much memory on every worker.
"""

_CUDA_SIGN = "CUDA error:"
"""Prefix of every CUDA error that torch raises."""

_CUDA_FULL = "out of memory"
"""Text of the only CUDA error after which a process can continue."""

_FROM_A_LOADER = "in DataLoader worker process"
"""Text in errors that processes of a torch DataLoader raise; the original traceback and error follow this text."""


def is_communication(error: BaseException) -> bool:
    """Return whether ``error`` is a communication error, so that the loss of another worker may be its cause.

    Also True if ``error`` was raised while a communication error was handled, since torch's error logging may fail.
    """
    return any(map(_is_communication, _causes(error)))


def _is_communication(error: BaseException) -> bool:
    if not isinstance(error, (ConnectionError, RuntimeError)):  # all communication errors of torch are RuntimeErrors
        return False
    files = _files(error)
    if _any_in(files, _IN_THE_DATA):
        return False
    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError)) or _any_in([str(error)], _SIGNS):
        return True
    known = isinstance(error, ConnectionError) or _any_in([str(error)], _COMMON_SIGNS)
    return known and _any_in(files, _IN_A_GROUP)


def is_in_a_group(error: BaseException) -> bool:
    """Return whether an operation on a group of processes raised ``error``, whatever the error's text.

    If another worker of the group is lost, this loss is the cause of the error.
    """
    found = [_files(each) for each in _causes(error)]
    return any(_any_in(files, _IN_A_GROUP) and not _any_in(files, _IN_THE_DATA) for files in found)


def _files(error: BaseException) -> list[str]:
    """Return the source files of the frames in the error's traceback."""
    return [frame.f_code.co_filename.replace("\\", "/") for frame, _ in traceback.walk_tb(error.__traceback__)]


def is_own(error: BaseException) -> bool:
    """Return whether ``error`` is a fault of this worker's host or device, so other workers may be unaffected.

    For a ``CheckpointFailed`` the attribute ``own`` decides, since workers share the checkpoint's file system.
    """
    if isinstance(error, CheckpointFailed):
        return error.own
    return any(_is(each, _OWN_NUMBERS, _OWN_SIGNS) for each in _causes(error))


def is_of_device(error: BaseException) -> bool:
    """Return whether CUDA has failed in this process: later CUDA calls may fail as well, or hang.

    After nearly all CUDA errors the process must be restarted.  An error in a kernel is reported by the next CUDA call,
    whatever this call does.
    """
    return any(_is_of_device(each) for each in _causes(error))


def _is_of_device(error: BaseException) -> bool:
    if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError) or _CUDA_FULL in str(error):
        return False
    return isinstance(error, (torch.AcceleratorError, DeviceStuck)) or str(error).startswith(_CUDA_SIGN)


def is_full(error: BaseException, folder: str) -> bool:
    """Return whether a full file system of ``folder`` caused ``error``, which was raised while a file was written."""
    if any(_is(each, _FULL_NUMBERS, _FULL_SIGNS) and not _is_elsewhere(each, folder) for each in _causes(error)):
        return True
    try:
        status = os.statvfs(folder)
    except OSError:
        return False
    return status.f_bavail * status.f_frsize < _FULL_BYTES


def is_write(error: BaseException, folder: str) -> bool:
    """Return whether ``error`` shows that ``folder`` or a file in this folder cannot be written."""
    if is_full(error, folder) or is_of_folder(error, folder):
        return True
    found = [each for each in _causes(error) if not _is_elsewhere(each, folder)]
    return any(_is(each, _FILE_NUMBERS, (_ARCHIVE,)) for each in found)


def is_of_folder(error: BaseException, folder: str) -> bool:
    """Return whether the text of ``error`` contains the path of ``folder`` or of a file in this folder."""
    return any(_names(each, folder) for each in _causes(error))


def _names(error: BaseException, folder: str) -> bool:
    return _any_in([str(error)], [repr(folder), os.path.join(folder, "")])


def _is_elsewhere(error: BaseException, folder: str) -> bool:
    """Return whether the error names a file outside ``folder``."""
    return isinstance(error, OSError) and error.filename is not None and not _names(error, folder)


def _is(error: BaseException, numbers: tuple[int, ...], signs: tuple[str, ...]) -> bool:
    return (isinstance(error, OSError) and error.errno in numbers) or _any_in([str(error)], signs)


def signature(error: BaseException) -> str:
    """Return an exception as one line that is equal on all workers for the same fault, except for numbers such as
    ranks."""
    text = " ".join(str(error).split())
    full = platform.node()
    for name in (full, full.partition(".")[0]):
        if name:
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "this host", text)
    if _FROM_A_LOADER in text:  # keep only the original error: another worker may raise it without a loader process
        text = text.rpartition(f" {type(error).__name__}: ")[2]
    return f"{type(error).__name__}: {text}"[:1000]


def in_short(error: BaseException) -> str:
    """Return the first sentence of an error, for messages, without torch's C++ source line."""
    text = re.sub(r"^\[\S+:\d+\] ", "", " ".join(str(error).split()))
    return text.partition(". ")[0][:120] or type(error).__name__


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield ``error`` and the exceptions that caused it, as ``__cause__`` and ``__context__`` name them."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or following.__context__


def _any_in(texts: list[str], parts: Iterable[str]) -> bool:
    return any(part in text for text in texts for part in parts)


END_SECONDS = 4.0
"""Seconds after which a process with a broken device exits, if it has not exited normally before."""


def check_device(device: torch.device) -> None:
    """Check that ``device`` still computes; raise CUDA's error if an earlier kernel has broken this process."""
    if device.type == "cuda":
        torch.zeros(1, device=device).add_(1)
        drained(device, within())


def break_device(device: torch.device) -> None:
    """Break CUDA in this process, for fault injection, by an index beyond the end of a tensor on ``device``."""
    torch.zeros(4, device=device)[torch.tensor([1 << 30], device=device)]


def exit_soon(seconds: float = END_SECONDS) -> None:
    """Make this process exit after ``seconds`` at the latest, since calls may hang after a device has failed."""
    timer = threading.Timer(seconds, _end)
    timer.daemon = True
    timer.start()


def _end() -> None:
    log.info("the device of this worker has failed, and its process has not ended in time: the process exits now")
    os._exit(EXIT_OWN_FAULT)
