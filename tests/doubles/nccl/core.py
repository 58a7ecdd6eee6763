"""The double of the module ``nccl.core`` (nccl4py 0.6.0)."""

from __future__ import annotations

import itertools
import random
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tests.doubles.nccl.net import net

SUCCESS, REMOTE_ERROR, IN_PROGRESS = 0, 6, 7
"""ncclResult_t in nccl.h."""


class NcclError(Exception):
    """nccl.bindings.nccl.NCCLError: raised by every call whose result is neither success nor in progress."""

    def __init__(self, status: int) -> None:
        super().__init__(f"NCCL's double: result {status}")
        self.status = status


class NcclInvalid(Exception):
    """What nccl4py itself refuses: a null communicator, buffers that do not fit."""


class NcclRedOp(IntEnum):
    SUM = 0


@dataclass(kw_only=True)
class NCCLConfig:
    blocking: bool | None = None
    max_ctas: int | None = None


class UniqueId:
    """128 bytes (NCCL_UNIQUE_ID_BYTES) that tell where the root listens, as NCCL's do."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __bytes__(self) -> bytes:
        return self.text.encode().ljust(128, b"\0")

    @staticmethod
    def from_bytes(data: bytes) -> UniqueId:
        assert len(data) == 128
        return UniqueId(data.rstrip(b"\0").decode())

    @property
    def root(self) -> str:
        return self.text.split("/")[0]


class Errors(IntEnum):
    """When this member sees that another one has died in the middle of an operation."""

    AT_ONCE = 0
    """Over sockets and InfiniBand: the proxy thread sees the closed connection (user guide, "Asynchronous errors")."""
    LATE = 1
    """The same after a while."""
    NEVER = 2
    """Over P2P: the kernel waits for a flag in memory that nobody will write (NCCL issue 863)."""


class Core:
    """``polls``: every call is in progress for at most so many queries.  ``errors``: see ``Errors``.

    ``posts``: an aborted kernel has its peers' complete with garbage, as over P2P and shared memory.

    The numbers are drawn from ``seed``.
    """

    NcclRedOp, NCCLConfig, UniqueId, NcclInvalid = NcclRedOp, NCCLConfig, UniqueId, NcclInvalid

    def __init__(self, *, polls: int = 3, errors: Errors = Errors.AT_ONCE, seed: int = 0, posts: bool = True) -> None:
        from tests.doubles.nccl.communicator import Communicator

        self.errors = errors
        self.posts = posts
        self._polls = polls
        self._draws = random.Random(seed)
        self._drawing = threading.Lock()
        self._grouped = threading.local()
        self.calls: list[str] = []
        """Names of the management calls made: init, abort."""
        self.live: set[Any] = set()
        """Communicators that were made and not aborted yet: nccl4py has no finaliser, so each must be."""
        self.strays: list[str] = []
        """Calls of a thread whose current device was not that of the communicator: each makes a context there, since
        NCCL gives back the device that it found by cudaSetDevice (group.cc; CUDA 12: that makes the context)."""
        self.Communicator: type[Any] = type("Communicator", (Communicator,), {"core": self})

    def get_unique_id(self) -> UniqueId:
        """The thread that gathers the members' addresses runs where this is called, as NCCL's bootstrap root does."""
        return UniqueId(f"{net().address}/{uuid.uuid4().hex[:16]}")

    def draw(self) -> int:
        with self._drawing:
            return self._draws.randint(0, self._polls)

    def draw_late(self) -> int:
        with self._drawing:
            return self._draws.randint(5, 50)

    @property
    def grouped(self) -> list[Any] | None:
        """What the calling thread's group holds; None: it is in none."""
        return getattr(self._grouped, "parts", None)

    @contextmanager
    def group(self) -> Iterator[None]:
        """ncclGroupStart and End: what is called inside is launched together, as one operation a communicator."""
        parts: list[Any] = []
        self._grouped.parts = parts
        try:
            yield
        finally:
            self._grouped.parts = None
            for (communicator, stream), its in itertools.groupby(parts, lambda part: (part[0], part[1])):
                communicator.launch([part for _, _, part in its], stream)
