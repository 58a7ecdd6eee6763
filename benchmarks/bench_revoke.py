"""Measure the time until all members of a ring stop, after one member dies or hangs in an all-reduce.

    python benchmarks/bench_revoke.py --world 4,8 --repeat 20 [--json FILE]

Workers are processes on this machine that all-reduce a bucket repeatedly.  One worker gets SIGKILL or SIGSTOP at a
random time.  The parent process, which replaces the membership, notices the death by a pidfd, and notifies all other
workers.  Each of these reports the time when its wait raised EpochRevoked.

    struck -> raised    from the signal to the exception: includes the kernel's cleanup of the dead process
    told -> raised      from the notification to the exception: the ring's own time.  Negative if the ring noticed the
                        death before the notification
"""

from __future__ import annotations

import argparse
import os
import random
import select
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.megatron_runs import command_line, forked, load_average, row, store, write
from recover_megatron.collectives.epoch import EpochRevoked
from recover_megatron.collectives.group_factory import open_group
from recover_megatron.collectives.ledger import Bucket


class PipeEpoch:
    """Epoch that is revoked when a byte arrives in the pipe ``pipe``."""

    def __init__(self, world: int, me: int, pipe: int) -> None:
        self.number = 1
        self.members = list(range(world))
        self.me = me
        self._pipe = pipe

    def on_revoke(self, callback: Callable[[str], None]) -> None:
        def listen() -> None:
            os.read(self._pipe, 1)
            callback("a worker died")

        threading.Thread(target=listen, daemon=True).start()


def work(world: int, port: int, revokes: list[int], arguments: argparse.Namespace, rank: int, report: TextIO) -> None:
    torch.set_num_threads(1)
    group = open_group(
        PipeEpoch(world, rank, revokes[rank]), dist.TCPStore("127.0.0.1", port, is_master=False), name="bench",
        secret=b"bench", transport_kind=arguments.transport_kind,
    )  # fmt: skip
    bucket = Bucket(torch.ones(int(arguments.mib * (1 << 18))))
    print("ready", file=report)
    try:
        while True:
            bucket.ledger.clear()
            group.all_reduce(bucket).wait()
    except EpochRevoked:
        print(time.monotonic(), file=report)


def strike(world: int, how: signal.Signals, arguments: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Send signal ``how`` to one of ``world`` workers; return (struck -> raised, told -> raised) of all survivors.

    Both are lists of milliseconds.
    """
    pipes = [os.pipe() for _ in range(world)]
    inputs, tell = ([pipe[end] for pipe in pipes] for end in (0, 1))
    with store() as port, forked(world, partial(work, world, port, inputs, arguments)) as (pids, reports):
        for report in reports:
            assert report.readline() == "ready\n"
        time.sleep(random.uniform(0.1, 0.2))
        victim = random.randrange(world)
        pidfd = os.pidfd_open(pids[victim])
        struck = time.monotonic()
        os.kill(pids[victim], how)
        if how is signal.SIGKILL:
            select.select([pidfd], [], [])
        sent = time.monotonic()
        survivors = [rank for rank in range(world) if rank != victim]
        for rank in survivors:
            os.write(tell[rank], b"!")
        raised = [float(reports[rank].readline()) for rank in survivors]
    for descriptor in (pidfd, *inputs, *tell):
        os.close(descriptor)
    return [1e3 * (at - struck) for at in raised], [1e3 * (at - sent) for at in raised]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--world", type=lambda text: [int(part) for part in text.split(",")], default=[4, 8])
    parser.add_argument("--mib", type=float, default=16)
    parser.add_argument("--transport", dest="transport_kind", choices=("tcp", "tcp-inline"), default="tcp")
    parser.add_argument("--repeat", type=int, default=20)
    arguments = parser.parse_args()
    print(f"before: {load_average()}, carrier {arguments.transport_kind}")
    print("| world | signal | struck -> raised ms: median | max | told -> raised ms: median | max |")
    print("| ---: | --- | ---: | ---: | ---: | ---: |")
    rows: list[dict[str, Any]] = []
    for world in arguments.world:
        for how in (signal.SIGKILL, signal.SIGSTOP):
            samples = [strike(world, how, arguments) for _ in range(arguments.repeat)]
            struck = [value for first, _ in samples for value in first]
            sent = [value for _, second in samples for value in second]
            rows.append({"world": world, "signal": how.name, "struck_ms": struck, "told_ms": sent})
            row(world, how.name, *(f"{of(times):.1f}" for times in (struck, sent) for of in (statistics.median, max)))
    write(arguments, rows)


if __name__ == "__main__":
    main()
