"""Measure the host's processor time per bucket in the data-parallel sums of an iteration.

    python benchmarks/bench_host_cost.py [--members 8] [--buckets 40] [--iterations 50] [--most 100] [--json FILE]

The host's Python code for a device's data-parallel sums holds the GIL, which the backward pass needs, too.  In this
benchmark one member of a group submits all buckets of an iteration and waits for them.  The processor time of the
process counts, with both threads.  The time of the fastest iteration is printed, because slower ones include other load
of the machine.

    native     reduce_scatter and all_gather of complete buckets, by the code for NCCL, over a communicator and events
               that complete immediately, so without the time of NCCL and nccl4py
    ring       one segment per chunk, over a transport that transfers nothing; includes the additions

Exits with 1 if the native collectives or the ring take more than ``--most`` microseconds per bucket.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.bench_ring import WholeRun
from benchmarks.megatron_runs import command_line, write
from recover_megatron.collectives.epoch import CancelToken
from recover_megatron.collectives.group import Group
from recover_megatron.collectives.ledger import Bucket
from recover_megatron.collectives.native import NativeGroup
from recover_megatron.collectives.nccl.communicator import Communicator
from recover_megatron.collectives.nccl.library import SUCCESS, Library
from recover_megatron.collectives.nccl.renewal import Keeper
from recover_megatron.collectives.nccl.resources import NcclNative
from recover_megatron.collectives.progress import ProgressThread
from recover_megatron.collectives.ring.executor import RingGroup, Tuning
from recover_megatron.collectives.transport.interface import Arrival, Pending, Transport

MOST = 100.0
"""Default of --most: largest accepted time per bucket, in microseconds."""
NUMEL = 8 * 1024
"""Number of elements of a bucket; so small that copying them takes almost no time."""


@dataclass(frozen=True)
class Over:
    """Operation of a transport that has already completed."""

    tensor: torch.Tensor
    done: bool = True


NOTHING = Over(torch.empty(0))


class IdleTransport(Transport):
    """Transport that transfers nothing: each receive returns zeros of the requested length."""

    scratch_peak = 0

    def __init__(self) -> None:
        self._arrivals: dict[int, Over] = {}

    def send(self, tensor: torch.Tensor, tag: int) -> Pending:
        return NOTHING

    def recv(self, numel: int, dtype: torch.dtype, tag: int) -> Arrival:
        if numel not in self._arrivals:
            self._arrivals[numel] = Over(torch.zeros(numel, dtype=dtype))
        return self._arrivals[numel]

    def nothing(self, *args: Any, **kwargs: Any) -> None:
        return None

    release = wait = abort = close = nothing


class Idle:
    """Stand-in for an NCCL communicator, stream or event; all its operations complete immediately."""

    is_valid = True

    def __init__(self, *args: object, **kwargs: object) -> None:
        return None

    def get_async_error(self) -> int:
        return SUCCESS

    def query(self) -> bool:
        return True

    def nothing(self, *args: object, **kwargs: object) -> None:
        return None

    reduce_scatter = allgather = send = recv = abort = record = wait_event = nothing


def idle_library() -> Library:
    cuda = SimpleNamespace(
        Stream=Idle, Event=Idle, current_stream=lambda device: None,
        stream=lambda stream: nullcontext(), current_device=lambda: 0,
    )  # fmt: skip
    return Library(SimpleNamespace(NcclRedOp=SimpleNamespace(SUM=0)), cuda, (2, 29, 7), ())


def groups(members: int) -> dict[str, Group]:
    epoch, library, token = WholeRun(range(members), 0), idle_library(), CancelToken(1)
    communicator = Communicator(library, Idle(), "idle", token, rank=0, size=members)
    assert communicator.advance()
    native = NcclNative(library, communicator, token, Keeper(), torch.device("cpu"))
    one_segment = Tuning(segment_bytes=16 << 20, least_bytes=16 << 20)
    return {
        "native": NativeGroup(epoch, ProgressThread(token, "native"), native),
        "ring": RingGroup(epoch, ProgressThread(CancelToken(1), "ring"), IdleTransport(), tuning=one_segment),
    }


def per_bucket(group: Group, buckets: Sequence[Bucket], iterations: int) -> float:
    """Return the microseconds of processor time per bucket in the fastest iteration."""
    found = []
    for _ in range(iterations):
        for bucket in buckets:
            bucket.ledger.clear()
        start = time.process_time()
        for handle in [group.all_reduce(bucket) for bucket in buckets]:
            handle.wait()
        found.append((time.process_time() - start) / len(buckets) * 1e6)
        assert all(bucket.ledger.complete for bucket in buckets)
    return min(found)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__)
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--buckets", type=int, default=40)
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--most", type=float, default=MOST, help="limit in microseconds per bucket")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    buckets = [Bucket(torch.zeros(NUMEL)) for _ in range(options.buckets)]
    numbers = {}
    for name, group in groups(options.members).items():
        numbers[name] = per_bucket(group, buckets, options.iterations)
        group.close()
        print(f"{name:8} {numbers[name]:7.1f} us per bucket", flush=True)
    write(options, {"members": options.members, "us_per_bucket": numbers})
    slow = [name for name, number in numbers.items() if number > options.most]
    if slow:
        print(f"more than {options.most:g} us per bucket: {', '.join(slow)}", file=sys.stderr)
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
