"""Pairs of workers that communicate without a pause until a thread ends their groups.

    pairs.py FOLDER messages|collectives|scattered

Each pair must come out of it by an error of communication; else this ends with exit code 1 and says what happened.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from recover_megatron.collectives.gloo.swappable_group import SwappableGroup
from recover_megatron.instep.faults import is_communication
from recover_megatron.instep.groups.model_parallel_groups import ModelParallelGroups
from tests.harness.patience import patient

ROUNDS = 24
SECONDS = patient(60)
"""After which a worker counts as stuck: without the guard it is for good."""


def messages(rank: int, source: random.Random) -> Callable[[], object]:
    tensor = torch.ones(source.choice([10, 1000, 100_000]))

    def both_ways() -> None:
        (dist.send if rank == 0 else dist.recv)(tensor, 1 - rank)
        (dist.recv if rank == 0 else dist.send)(tensor, 1 - rank)

    return both_ways


def collectives(rank: int, source: random.Random) -> Callable[[], object]:
    del rank
    tensor = torch.ones(source.choice([10, 1000, 100_000]))
    parts = [torch.empty_like(tensor), torch.empty_like(tensor)]
    return lambda: (dist.all_reduce(tensor), dist.all_gather(parts, tensor))


def scattered(rank: int, source: random.Random) -> Callable[[], object]:
    del rank
    tensor = torch.ones(source.choice([10, 1000, 100_000]))
    return lambda: dist.reduce_scatter_single(torch.empty(tensor.numel() // 2), tensor)


def member(rank: int, folder: Path, kind: Callable[..., Callable[[], object]], seed: int) -> None:
    """Communicate without a pause until a thread ends the groups; exit 0 when it is told by an error of theirs."""
    inside = ModelParallelGroups((), torch.device("cpu"))
    store = dist.FileStore(str(folder / f"store-{seed}"), 2)
    inside.make(lambda: dist.init_process_group("gloo", store=store, rank=rank, world_size=2))
    default = dist.distributed_c10d._get_default_group()
    group = SwappableGroup(default, [0, 1], rank, "pair", "gloo")
    inside.keep(group)
    world = dist.distributed_c10d._world
    world.pg_map[group], world.pg_names[group] = world.pg_map[default], "pair"
    world.pg_group_ranks[group] = {0: 0, 1: 1}
    dist.distributed_c10d._update_default_pg(group)
    source = random.Random(seed)
    operation, delay = kind(rank, source), source.uniform(0.01, 0.05)
    operation()
    threading.Timer(delay + random.Random(rank + seed).uniform(0, 0.002), inside.end).start()
    while True:
        try:
            operation()
        except Exception as error:  # noqa: BLE001  whatever it is, it must be known for what it is
            os._exit(0 if is_communication(error) else 1)


def run(folder: Path, kind: Callable[..., Callable[[], object]]) -> None:
    """All rounds.  Forks: no other thread may run in this process."""
    for seed in range(ROUNDS):
        running = set()
        for rank in (0, 1):
            if not (pid := os.fork()):
                try:
                    member(rank, folder, kind, seed)
                except BaseException:  # noqa: BLE001  a forked child must not go on as its parent
                    traceback.print_exc()
                os._exit(2)
            running.add(pid)
        deadline, wrong = time.monotonic() + SECONDS, ""
        while running and not wrong:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid:
                running.remove(pid)
                wrong = f"a worker ended with {os.waitstatus_to_exitcode(status)}, seed {seed}" if status else ""
            elif time.monotonic() > deadline:
                wrong = f"a worker is stuck, seed {seed}"
            else:
                time.sleep(0.005)
        for pid in running:
            os.kill(pid, signal.SIGKILL)
        if wrong:
            sys.exit(wrong)


if __name__ == "__main__":
    run(Path(sys.argv[1]), {"messages": messages, "collectives": collectives, "scattered": scattered}[sys.argv[2]])
