"""Worker of bench_recovery.py that recovers by torch's own reconfiguration of gloo, without this package.

The workers all-reduce repeatedly.  In gloo only the neighbours of a dead worker get an error, and the error does not
name the dead worker.  So the launcher reports the dead worker: it sets a key of torch's store, for which a thread of
each worker waits.  This thread reconfigures the group among the survivors by ``torch.distributed._reconfigure``, which
torch has since 2.14 and calls experimental.  An all-reduce that waits for the dead worker fails when the kernel closes
the connection.
"""

from __future__ import annotations

import itertools
import json
import signal
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TextIO

import torch
import torch.distributed as dist

DEAD = "dead"
"""Key in torch's store by which the launcher reports the dead worker."""
PATIENCE = timedelta(seconds=60)


def lacking() -> str:
    """Return a message if this torch cannot reconfigure gloo; else an empty string."""
    return "" if hasattr(dist, "_reconfigure") else f"torch {torch.__version__} cannot reconfigure gloo (2.14 can)"


class Teller:
    """Part of the launcher that reports a death to the workers."""

    def __init__(self, store_port: int) -> None:
        self._store = dist.TCPStore("127.0.0.1", store_port, is_master=False)
        self.told: dict[str, float] = {}
        """"detect" -> time of the first report, in seconds of the monotonic clock; empty before the report."""

    def tell(self, dead: int, how: str) -> None:
        """Report to all workers that ``dead`` has died, unless an earlier death was reported."""
        if not self.told:
            self.told["detect"] = time.monotonic()
            self._store.set(DEAD, str(dead))


def work(store_port: int, size: int, elements: int, warm_up: int, me: int, report: TextIO) -> None:
    """Run one worker: all-reduce until a death, reconfigure the group, all-reduce once more, report the times.

    Afterwards the worker waits until it is killed.
    """
    torch.set_num_threads(1)
    times: dict[str, float] = {}

    def note(event: str) -> None:
        times.setdefault(event, time.monotonic())

    store = dist.TCPStore("127.0.0.1", store_port, is_master=False)
    rendezvous = dist.PrefixStore("world", store)
    dist.init_process_group(
        "gloo", store=rendezvous, rank=me, world_size=size, timeout=PATIENCE, enable_reconfigure=True
    )

    def configure(through: dist.Store, number: int, members: Sequence[int]) -> None:
        """Reconfigure the group to ``members``."""
        group = dist.group.WORLD
        through.set(f"{number}/{me}", dist._get_reconfigure_handle(group))
        handles = [through.get(f"{number}/{member}").decode() for member in members]
        dist._reconfigure(uuid=number, handles=handles, group=group, timeout=PATIENCE).wait()

    configured = threading.Event()

    def watch() -> None:
        shared = dist.TCPStore("127.0.0.1", store_port, is_master=False)  # new, because wait() blocks a connection
        shared.wait([DEAD], timedelta(days=1))
        note("revoke")
        dead = int(shared.get(DEAD))
        configure(shared, 2, [worker for worker in range(size) if worker != dead])
        note("regroup")
        configured.set()

    configure(store, 1, range(size))
    threading.Thread(target=watch, daemon=True).start()
    for number in itertools.count(1):
        if "revoke" in times:
            configured.wait()
        summed = torch.ones(elements)
        try:
            dist.all_reduce(summed)
        except RuntimeError:
            if configured.is_set() and "unwind" in times:
                raise  # the new group is broken, too
            note("unwind")
            configured.wait()
            continue
        if number == warm_up:
            print(file=report)
        if summed[0] == size - 1:
            note("reduce")
            print(json.dumps(times), file=report)
            signal.pause()
