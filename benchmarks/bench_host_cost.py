"""What an iteration costs the host: Python time per bucket, with nothing to wait for.

    python benchmarks/bench_host_cost.py [--members 8] [--buckets 40] [--iterations 50] [--most 100] [--json FILE]

A device's data-parallel sums cost its host the planning, ordering, launching and marking, and that is under the
interpreter's lock, which backward needs as well.  Here one member of a group hands in all buckets of an iteration and
waits for them; the processor time of the whole process counts (both threads).  The quickest iteration is told: the
others paid for what the machine did beside them.

    native     reduce_scatter and all_gather, each bucket as a whole, by the code for NCCL, over a communicator and
               events that are over as soon as they are asked for (without NCCL's own time, and that of nccl4py)
    ring       one segment per chunk, over a transport that does nothing; its sums are part of it

Exits with 1 when the native collectives or the ring take more than ``--most`` microseconds per bucket.
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
from recover_megatron.collectives.nccl.groups import NcclNative
from recover_megatron.collectives.nccl.library import SUCCESS, Library
from recover_megatron.collectives.nccl.renewal import Keeper
from recover_megatron.collectives.progress import ProgressThread
from recover_megatron.collectives.ring.executor import RingGroup, Tuning
from recover_megatron.collectives.transport.interface import Arrival, Pending, Transport

MOST = 100.0
"""Microseconds per bucket."""
NUMEL = 8 * 1024
"""Elements of a bucket: so few that moving them costs next to nothing."""


@dataclass(frozen=True)
class Over:
    """Whatever it was, it is over."""

    tensor: torch.Tensor
    done: bool = True


NOTHING = Over(torch.empty(0))


class IdleTransport(Transport):
    """All arrivals of one length are the same zeros."""

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
    """A communicator of NCCL's that has done whatever it is asked for; a stream, or an event, where all is over."""

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
    """Microseconds of processor time per bucket, of the quickest iteration."""
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
    parser.add_argument("--most", type=float, default=MOST, help="microseconds per bucket that are still accepted")
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
