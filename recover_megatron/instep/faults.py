"""Tells whose fault an exception is: of somebody this worker communicates with, of its host or device, of the work.

of a mate    an operation on a group of this replica failed         ``is_in_a_group``, if a mate is lost, and else
                                                                      ``is_communication``; the worker is an orphan
its own      its host or device cannot do what others may           ``is_own``; the worker ends, the run goes on
its context  CUDA has failed in this process                        ``is_of_device``; the worker ends, an orphan, too,
                                                                      soon, whatever hangs in it (``ends_soon``)
any other    of the worker or of its work: the coordinator finds    ``signature``; the worker ends, and the run if
             out by who else meets it                               the work ends others, too

``InStepError`` and its kinds say what ends a worker's part in the training other than the end of the training.
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
"""That of a worker whose flags are wrong, or not those of the run; nobody is started in its place."""


class Orphaned(InStepError):
    """This worker's replica is broken: another of its workers is gone.  The worker leaves the training and waits."""


class NoReplica(InStepError):
    """No complete replica is left, or fewer than the user wants: the run ends with exit code 10."""

    code = EXIT_NO_REPLICA


class WrongGradients(Disagreement):
    """A pass of this worker is over, and has not added the gradients of its microbatches alone."""


class StateLost(InStepError):
    """Workers enough for a replica live, but nobody holds the state of one of its positions: exit code 12."""

    code = EXIT_STATE_LOST


class RunOver(InStepError):
    """The run is over for this worker, which has no place: ``code`` is the exit code, the text says why."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class Drained(RunOver):
    """This worker's node is drained: it has left the run in order, which goes on without it."""

    def __init__(self, node: str) -> None:
        super().__init__(0, f"node {node} is drained")


class OtherFlags(RunOver):
    """This worker was started with other flags than the run, or runs another program: exit code 2.  The run goes on
    without it.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(EXIT_REFUSED, reason)


class OtherPosition(InStepError):
    """This worker is wanted in another position: it builds the model of ``position``, and comes back."""

    def __init__(self, position: int) -> None:
        super().__init__(f"position {position} is wanted of this worker")
        self.position = position


class Spoiled(ValueError):
    """Nobody holds the snapshot as it was taken."""


class CheckpointFailed(InStepError):
    """A checkpoint cannot be written.  ``own``: by this worker; others can.  ``to_folder``: the folder does not let it
    be, which needs no traceback.
    """

    def __init__(self, message: str, *, own: bool, to_folder: bool = False) -> None:
        super().__init__(message)
        self.own, self.to_folder = own, to_folder


class UnknownOperation(InStepError):
    """An operation over replicas inside a step, of which the recovery does not know what it is for: exit code 1."""


_SIGNS = (
    "gloo/transport",
    "NCCL error",
    "ncclRemoteError",
    "ncclSystemError",
    "NCCL communicator was aborted",
)
"""Texts of torch's communication errors that have no type of their own (gloo raises RuntimeError)."""

_COMMON_SIGNS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed")
"""The same, in words that others than torch use: only from within an operation on a group."""

_IN_A_GROUP = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/c10d_logger.py",
    "recover_megatron/collectives/",
    "recover_megatron/instep/groups/process_group.py",
    "recover_megatron/instep/groups/traffic.py",
)
"""Where operations on groups are: files of frames."""

_IN_THE_DATA = ("torch/utils/data/", "recover_megatron/megatron_hooks/data/source.py")
"""Where samples are read.  What fails below is no mate's doing, whatever it looks like: a store of data has hung up."""

_FULL_NUMBERS = (errno.ENOSPC, errno.EDQUOT)
DISK_QUOTA = "Disk quota exceeded"
_FULL_SIGNS = ("No space left on device", DISK_QUOTA)
_FULL_BYTES = 1 << 16
"""A file system with less to give is full: torch's writer of archives does not say why it failed."""

_FILE_NUMBERS = (errno.EIO, errno.EFBIG, errno.EROFS, errno.ESTALE)
"""Of what is met with an open file, whose name the error does not have."""
_ARCHIVE = "PytorchStreamWriter failed"
"""torch's writer of archives: nor has its error."""

_OWN_NUMBERS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, *_FULL_NUMBERS)

_OWN_SIGNS = (
    "Too many open files",
    "Cannot allocate memory",
    *_FULL_SIGNS,
    "items of ancdata",  # torch's words where a process may not open the descriptors that were sent to it
    "insufficient shared memory",
    "uncorrectable ECC",
    "uncorrectable NVLink",
    "over nvlink or a hardware error",
    "hardware stack error",
    "system not yet initialized",
    "no CUDA-capable device",
    "CUDA-capable device(s) is/are busy or unavailable",
)
"""Of faults that say nothing about the work, in whatever type: full tables, disks and memories of hosts, devices that
have failed.  The memory of a device is not among them: what the work asks for may be too much for each.
"""

_CUDA_SIGN = "CUDA error:"
"""With this begins the text of every error of CUDA's that torch raises."""

_CUDA_FULL = "out of memory"
"""The one after which a process can go on."""

_FROM_A_LOADER = "in DataLoader worker process"
"""In the text of an exception that a process of a torch DataLoader raised: its traceback follows, and its own text."""


def is_communication(error: BaseException) -> bool:
    """Whether ``error`` came from an operation on a group of processes, so that another worker may be its cause.

    Also when it was raised while such an error was handled (torch's own logging of it may fail).
    """
    return any(map(_is_communication, _causes(error)))


def _is_communication(error: BaseException) -> bool:
    if not isinstance(error, (ConnectionError, RuntimeError)):  # torch's types for it are RuntimeErrors
        return False
    files = _files(error)
    if _any_in(files, _IN_THE_DATA):
        return False
    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError)) or _any_in([str(error)], _SIGNS):
        return True
    known = isinstance(error, ConnectionError) or _any_in([str(error)], _COMMON_SIGNS)
    return known and _any_in(files, _IN_A_GROUP)


def is_in_a_group(error: BaseException) -> bool:
    """Whether ``error`` was raised in an operation on a group of processes, in whatever words: if another worker of the
    group is lost, that is the cause.
    """
    found = [_files(each) for each in _causes(error)]
    return any(_any_in(files, _IN_A_GROUP) and not _any_in(files, _IN_THE_DATA) for files in found)


def _files(error: BaseException) -> list[str]:
    """Those of the frames that it came through."""
    return [frame.f_code.co_filename.replace("\\", "/") for frame, _ in traceback.walk_tb(error.__traceback__)]


def is_own(error: BaseException) -> bool:
    """Whether ``error`` is a fault of this worker's host or device, of which another worker need not have its like.

    Of a checkpoint it is known: what its file system says is everybody's, whatever it means elsewhere.
    """
    if isinstance(error, CheckpointFailed):
        return error.own
    return any(_is(each, _OWN_NUMBERS, _OWN_SIGNS) for each in _causes(error))


def is_of_device(error: BaseException) -> bool:
    """Whether CUDA has failed in this process: what it is asked for from now on may fail as well, or hang.

    "To continue using CUDA, the process must be terminated and relaunched" holds for nearly all of its errors, those of
    kernels first of all, and they are told by whichever call comes next.
    """
    return any(_is_of_device(each) for each in _causes(error))


def _is_of_device(error: BaseException) -> bool:
    if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError) or _CUDA_FULL in str(error):
        return False
    return isinstance(error, (torch.AcceleratorError, DeviceStuck)) or str(error).startswith(_CUDA_SIGN)


def is_full(error: BaseException, folder: str) -> bool:
    """Whether ``error``, met while a file was written in ``folder``, means that its file system has no space left."""
    if any(_is(each, _FULL_NUMBERS, _FULL_SIGNS) and not _is_elsewhere(each, folder) for each in _causes(error)):
        return True
    try:
        status = os.statvfs(folder)
    except OSError:
        return False
    return status.f_bavail * status.f_frsize < _FULL_BYTES


def is_write(error: BaseException, folder: str) -> bool:
    """Whether ``error`` says of ``folder``, or of a file in it, that it cannot be written."""
    if is_full(error, folder) or is_of_folder(error, folder):
        return True
    found = [each for each in _causes(error) if not _is_elsewhere(each, folder)]
    return any(_is(each, _FILE_NUMBERS, (_ARCHIVE,)) for each in found)


def is_of_folder(error: BaseException, folder: str) -> bool:
    """Whether ``error`` was met with ``folder`` or something in it, by the names that the system's errors have."""
    return any(_names(each, folder) for each in _causes(error))


def _names(error: BaseException, folder: str) -> bool:
    return _any_in([str(error)], [repr(folder), os.path.join(folder, "")])


def _is_elsewhere(error: BaseException, folder: str) -> bool:
    """Whether it names a file, and none in ``folder``."""
    return isinstance(error, OSError) and error.filename is not None and not _names(error, folder)


def _is(error: BaseException, numbers: tuple[int, ...], signs: tuple[str, ...]) -> bool:
    return (isinstance(error, OSError) and error.errno in numbers) or _any_in([str(error)], signs)


def signature(error: BaseException) -> str:
    """An exception in one line: for the same fault on another worker equal but for its numbers (ranks, devices)."""
    text = " ".join(str(error).split())
    full = platform.node()
    for name in (full, full.partition(".")[0]):
        if name:
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "this host", text)
    if _FROM_A_LOADER in text:  # one worker's loader process met what another meets on the spot
        text = text.rpartition(f" {type(error).__name__}: ")[2]
    return f"{type(error).__name__}: {text}"[:1000]


def in_short(error: BaseException) -> str:
    """The first sentence of an error, for people, without the line of torch's C++ that raised it."""
    text = re.sub(r"^\[\S+:\d+\] ", "", " ".join(str(error).split()))
    return text.partition(". ")[0][:120] or type(error).__name__


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The exception and what it came from, or was raised in the handling of."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or following.__context__


def _any_in(texts: list[str], parts: Iterable[str]) -> bool:
    return any(part in text for text in texts for part in parts)


END_SECONDS = 4.0
"""In which a process with a broken device ends, if it has not by itself."""


def check_device(device: torch.device) -> None:
    """Return if ``device`` still computes; raises what CUDA raises if an earlier kernel has broken this process."""
    if device.type == "cuda":
        torch.zeros(1, device=device).add_(1)
        drained(device, within())


def break_device(device: torch.device) -> None:
    """Index beyond a tensor on ``device``: the kernel's assertion is an error that lasts until the process ends."""
    torch.zeros(4, device=device)[torch.tensor([1 << 30], device=device)]


def ends_soon(seconds: float = END_SECONDS) -> None:
    """See to it that this process ends within ``seconds``: with a broken device anything may hang from here on."""
    timer = threading.Timer(seconds, _end)
    timer.daemon = True
    timer.start()


def _end() -> None:
    log.info("the device of this worker has failed, and its last words take too long: it ends")
    os._exit(EXIT_OWN_FAULT)
