"""The NCCL library that torch has loaded, NCCL's Python bindings (nccl4py) for it, and where its aborts run.

Everything else in this package gets a ``Library`` as an argument, so that a double can stand in for NCCL and CUDA.
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
"""Aborts hang in several versions before it (docs/gpu.md)."""
_OLDEST_BINDINGS = (0, 6)
SUCCESS, IN_PROGRESS = 0, 7
"""ncclResult_t (nccl.h); every other value is an error."""


@dataclass(frozen=True)
class Library:
    """``core``: the module ``nccl.core``.  ``cuda``: ``torch.cuda``.  ``errors``: what a failed call raises."""

    core: Any
    cuda: Any
    version: tuple[int, ...]
    errors: tuple[type[Exception], ...]

    def config(self) -> Any:
        """Of a communicator: no call of NCCL's blocks longer than it takes to hand something over."""
        return self.core.NCCLConfig(blocking=False)

    def unique_id(self) -> str:
        """As text, for the rendezvous."""
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
    """Call ``abort`` in a thread of its own, since it may wait for the device; ``over`` gets what it has raised, if so.

    ``cuda``: ``torch.cuda``, or a double.  The thread's current device is ``device``: an abort restores the one that it
    has found, which makes a context of some 400 MB there, and a new thread finds the first GPU, whoever uses that.
    """

    def run() -> None:
        error: BaseException | None = None
        try:
            with cuda.device(device):
                abort()
        except BaseException as raised:  # noqa: BLE001  the thread's boundary: told to ``over``
            error = raised
        over(error)

    threading.Thread(target=run, name=name, daemon=True).start()


def checked(library: Library) -> Library:
    """``library`` itself; ``UserError`` if it is too old."""
    if library.version < OLDEST:
        found, oldest = (".".join(map(str, version)) for version in (library.version, OLDEST))
        raise UserError(
            f"--recover: torch has loaded NCCL {found}; {oldest} or later is needed (in older ones aborts hang)."
            " Take a newer torch"
        )
    return library


@cache
def load() -> Library:
    """The library of this process.  ``UserError`` where nccl4py or NCCL is missing, or one of them is too old."""
    # torch was imported above, with the libnccl that it brings: nccl4py takes the one that is loaded already.
    try:
        if tuple(map(int, re.findall(r"\d+", here := version("nccl4py"))))[:2] < _OLDEST_BINDINGS:
            raise ImportError(f"{here} is too old")
        core, bindings = import_module("nccl.core"), import_module("nccl.bindings.nccl")
    except ImportError as error:
        raise UserError(
            f"--recover: gradients travel over NCCL by NCCL's Python bindings, nccl4py, which cannot be used ({error}):"
            " pip install 'nccl4py>=0.6,<0.7', or recover-megatron[gpu]"
        ) from error
    found = core.get_version().libnccl
    if found is None:
        raise UserError("--recover: nccl4py finds no NCCL library: this torch is built without it")
    errors = (bindings.NCCLError, core.NcclInvalid)
    return checked(Library(core, torch.cuda, tuple(found.version.release), errors))
