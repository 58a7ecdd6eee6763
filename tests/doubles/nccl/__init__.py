"""A double of nccl4py's ``nccl.core`` and of torch.cuda's streams, on CPU tensors, for threads and processes.

    library()  -->  Library(core = Core(...), cuda = tests.doubles.nccl.streams): what recover_megatron.collectives.nccl
                    is given in place of the real one

``core``     the module: Communicator, get_unique_id, group, ...       nccl4py 0.6.0's code (nccl/core/*.py)
``streams``  operations in the order of their stream, in a thread      the CUDA programming guide
``net``      messages between ranks                                     (NCCL's own are not imitated)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recover_megatron.collectives.nccl.library import Library
from tests.doubles.nccl import streams
from tests.doubles.nccl.core import Core, NcclError, NcclInvalid


def library(version: Sequence[int] = (2, 29, 7), **settings: Any) -> Library:
    """``settings``: those of ``Core``."""
    version = tuple(version)
    return Library(Core(**settings), streams, version, (NcclError, NcclInvalid))
