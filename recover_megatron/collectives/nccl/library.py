"""Access to the NCCL library that torch has loaded, through the Python bindings nccl4py; threads for NCCL aborts.

The other modules use NCCL and CUDA through a ``Library``, which tests replace by a double.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import version
from typing import Any

import torch

from recover_megatron.errors import UserError

OLDEST = (2, 27, 0)
"""Oldest supported version of NCCL; aborts hang in some older versions (docs/gpu.md)."""
_OLDEST_BINDINGS = (0, 6)
SUCCESS, IN_PROGRESS = 0, 7
"""Values of ncclResult_t (nccl.h): ncclSuccess, ncclInProgress; every other value is an error."""


@dataclass(frozen=True)
class Library:
    """Loaded NCCL library.

    ``core``: the module ``nccl.core``.  ``cuda``: ``torch.cuda``.  ``version``: NCCL's version.  ``errors``: exception
    types that NCCL calls raise.
    """

    core: Any
    cuda: Any
    version: tuple[int, ...]
    errors: tuple[type[Exception], ...]

    def config(self) -> Any:
        """Return the configuration of a non-blocking communicator, whose calls may return before they are complete."""
        return self.core.NCCLConfig(blocking=False)

    def unique_id(self) -> str:
        """Return a new unique id of NCCL as hexadecimal text; all members need it to open a communicator."""
        return bytes(self.core.get_unique_id()).hex()

    def read_unique_id(self, text: str) -> Any:
        return self.core.UniqueId.from_bytes(bytes.fromhex(text))


def _raised(error: BaseException | None) -> None:
    if error is not None:
        raise error


def abort_beside(
    name: str,
    cuda: Any,
    device: torch.device | int,
    abort: Callable[[], None],
    over: Callable[[BaseException | None], None] = _raised,
) -> None:
    """Call ``abort`` in a new thread, because it may wait for the device; then call ``over``.

    ``over`` gets the error that ``abort`` raised, or None.  ``cuda``: ``torch.cuda``, or a double.  In the thread,
    ``device`` is the current device.  Otherwise device 0 would be current, and the abort, which restores the current
    device at its end, would create a context of about 400 MB on device 0.
    """

    def run() -> None:
        error: BaseException | None = None
        try:
            with cuda.device(device):
                abort()
        except BaseException as raised:  # noqa: BLE001  the thread's boundary: passed to ``over``
            error = raised
        over(error)

    threading.Thread(target=run, name=name, daemon=True).start()


def checked(library: Library) -> Library:
    """Return ``library``; raise ``UserError`` if its NCCL version is too old."""
    if library.version < OLDEST:
        found, oldest = (".".join(map(str, version)) for version in (library.version, OLDEST))
        raise UserError(
            f"--recover cannot use NCCL {found}, which torch has loaded: {oldest} or later is required, because aborts "
            "hang in older versions. Install a newer torch"
        )
    return library


@cache
def load() -> Library:
    """Return the NCCL library of this process; raise ``UserError`` if nccl4py or NCCL is missing or too old."""
    # ``import torch`` has loaded torch's libnccl, and nccl4py uses the loaded library.
    try:
        if tuple(map(int, re.findall(r"\d+", here := version("nccl4py"))))[:2] < _OLDEST_BINDINGS:
            raise ImportError(f"{here} is too old")
        core, bindings = import_module("nccl.core"), import_module("nccl.bindings.nccl")
    except ImportError as error:
        raise UserError(
            f"--recover sums gradients over NCCL with the Python bindings nccl4py, which cannot be used ({error}): run"
            " pip install 'nccl4py>=0.6,<0.7', or install recover-megatron[gpu]"
        ) from error
    found = core.get_version().libnccl
    if found is None:
        raise UserError("--recover: nccl4py finds no NCCL library: install a torch that is built with NCCL")
    errors = (bindings.NCCLError, core.NcclInvalid)
    return checked(Library(core, torch.cuda, tuple(found.version.release), errors))
