"""The ring over tcp, and torch's communicators, on a GPU: a process of its own, so that a crash is one failed check.

    python scripts/lib/gpu_collectives.py WHAT     prints a line: a number and its unit

Members are threads of this process, which share the device; each group has its own stream.  ``host`` in the place of
a GPU (RECOVER_REHEARSE=1) makes the same copies and no use of streams.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

from recover_megatron.collectives.group import Group
from recover_megatron.collectives.ledger import Bucket
from recover_megatron.collectives.torch_nccl import make_backend
from tests.collectives.together import together

REHEARSE = os.environ.get("RECOVER_REHEARSE") == "1"
DEVICE = torch.device("cpu") if REHEARSE else torch.device("cuda", 0)
ELEMENTS = 1 << (20 if REHEARSE else 24)
ROUNDS = 5
SPIN = 200_000_000
"""Cycles of a kernel that makes a gradient late: about a tenth of a second."""
SECONDS = 60.0


def reduced(size: int) -> str:
    """All-reduce of whole numbers whose writing is still under way on another stream when the bucket is handed over."""
    expected = sum(range(1, size + 1))

    def work(group: Group) -> float:
        stream = None if REHEARSE else torch.cuda.Stream(DEVICE)
        buckets = [Bucket(torch.zeros(ELEMENTS, device=DEVICE)) for _ in range(ROUNDS)]
        if stream is not None:
            torch.cuda.synchronize(DEVICE)
        started = time.perf_counter()
        for bucket in buckets:
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                if stream is not None and bucket is buckets[0]:
                    torch.cuda._sleep(SPIN)
                bucket.flat.fill_(group.rank + 1)
                handle = group.all_reduce(bucket)
            handle.wait(SECONDS)
            # On the default stream, which knows nothing of the group's.
            if not bool((bucket.flat == expected).all()) or not bucket.ledger.complete:
                raise SystemExit(f"wrong sums: {bucket.flat.unique().tolist()[:5]} instead of {expected}")
        tail = Bucket(torch.ones(100, dtype=torch.float64, device=DEVICE))
        group.all_reduce(tail).wait(SECONDS)
        if tail.flat.tolist() != [float(size)] * 100 or group.exchange_doubles([0.1]) != [[0.1]] * size:
            raise SystemExit("float64 numbers did not come through")
        return time.perf_counter() - started

    seconds = max(together(size, work, dist.HashStore(), device=DEVICE, transport_kind="tcp", staged=REHEARSE))
    return f"{ROUNDS * ELEMENTS * 4 / seconds / 1e9:.2f} GB/s"


def torch_collectives() -> str:
    """Every collective that Megatron asks of a rebuilt group, over a non-blocking communicator of one rank."""
    backend = make_backend(dist.HashStore(), 0, 1)
    backend.eager_connect_single_device(DEVICE)
    tensor, other = torch.ones(1000, device=DEVICE), torch.zeros(1000, device=DEVICE)
    calls: dict[str, Any] = {
        "all-reduce": lambda: backend.allreduce([tensor], dist.AllreduceOptions()),
        "broadcast": lambda: backend.broadcast([tensor], dist.BroadcastOptions()),
        "reduce-scatter": lambda: backend._reduce_scatter_base(other, tensor, dist.ReduceScatterOptions()),
        "all-gather": lambda: backend._allgather_base(other, tensor, dist.AllgatherOptions()),
        "all-to-all": lambda: backend.alltoall_base(other, tensor, [], [], dist.AllToAllOptions()),
        "barrier": lambda: backend.barrier(dist.BarrierOptions()),
    }
    for name, call in calls.items():
        other.zero_()
        _over(call(), name)
        if name not in ("all-reduce", "broadcast", "barrier") and not bool((other == 1).all()):
            raise SystemExit(f"{name}: wrong result")
    return f"{len(calls)} collectives"


def _over(work: Any, what: str) -> None:
    until = time.monotonic() + SECONDS
    while not work.is_completed():
        if time.monotonic() > until:
            raise SystemExit(f"{what} of one rank did not end")
        time.sleep(0.001)
    work.wait()  # raises what is_completed does not tell


def aborted() -> str:
    """A communicator of one rank: made, used, aborted from another thread, and the device goes on."""
    backend = make_backend(dist.HashStore(), 0, 1)
    backend.eager_connect_single_device(DEVICE)
    tensor = torch.ones(1000, device=DEVICE)
    work = backend.allreduce([tensor], dist.AllreduceOptions())
    _over(work, "all-reduce")
    aborting, started = threading.Thread(target=backend.abort, daemon=True), time.perf_counter()
    aborting.start()
    aborting.join(SECONDS)
    if aborting.is_alive():
        raise SystemExit("the abort did not return")
    seconds = time.perf_counter() - started
    if float(torch.ones(1000, device=DEVICE).sum()) != 1000:
        raise SystemExit("the device computes wrongly after an abort")
    return f"{1e3 * seconds:.0f} ms"


CHECKS = {
    "ring-tcp": lambda: reduced(3),
    "torch-collectives": torch_collectives,
    "torch-abort": aborted,
}

if __name__ == "__main__":
    print(CHECKS[sys.argv[1]](), flush=True)
