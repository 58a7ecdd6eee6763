"""Measure the time to open an epoch: the group of all workers, and the rings of two columns.

    python benchmarks/bench_epochs.py --members 8 64 256 1024

Members are simulated workers: each is a thread with a peer store, in one of a few processes; their sockets are real, on
the loopback.  Every member is in every group, as with one worker per replica.  Two methods are compared in one run:

    mesh   a gloo group of all members, then the rings sequentially: the old method
    tree   a tree of all members, then the rings concurrently: the current method

Columns of the table: "world" and "rings" are the seconds until the slowest member has opened the group of all members
and the rings.  "barrier" is the time of the first barrier of all members.  "connections" is the number of connections
of this group and both rings, over all members; "most" is the largest number of one member.  Connections to peer stores,
over which neighbours read addresses, are not counted.

The members share this machine's processors, and network latency is not simulated, so the seconds grow with the number
of members.  The mesh is opened only up to ``MOST_IN_A_MESH`` members, because gloo groups in one process would find
each other's sockets.  For more members only the mesh's connections are computed.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.megatron_runs import FORK, command_line, head, load_average, reported, row, store, write
from recover_megatron.collectives.epoch import CancelToken
from recover_megatron.collectives.gloo.abortable_groups import GlooGroups
from recover_megatron.collectives.peers import Neighbours, PeerStoreClient
from recover_megatron.collectives.transport.tcp import TcpTransport
from recover_megatron.collectives.tree import Tree, TreeBackend
from recover_megatron.network.peer_store import PeerStoreServer

SECRET = b"of the benchmark"
COLUMNS = 2
MOST_IN_A_MESH = 8
TIMEOUT = 600.0


class Member:
    """Simulated worker.  ``addresses``: addresses of all members' peer stores, by rank; empty until they are known."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.peer_store = PeerStoreServer("127.0.0.1", SECRET)
        self.addresses: list[str] = []

    def open(self, way: str, epoch: int, met: Callable[[], float]) -> dict[str, float]:
        """Open all groups by the method ``way``, close them again, and return the measurements of this member.

        ``met``: function that waits for all members, and returns the time.
        """
        token, size = CancelToken(epoch), len(self.addresses)
        began = met()
        group: Any
        if way == "mesh":
            first = PeerStoreClient(self.addresses[0], SECRET, epoch)
            mesh = {"all": range(size)}
            group = GlooGroups(self.rank, mesh, first, token, ring=f"world/{epoch}", timeout=TIMEOUT)
            own = size - 1
        else:
            where = self.addresses, self.peer_store, SECRET
            tree = Tree(self.rank, range(size), *where, token, name=f"tree/{epoch}", timeout=TIMEOUT)
            group = TreeBackend(tree)
            own = len(tree.children) + (tree.parent is not None)
        world = met()
        if way == "mesh":
            group.backends["all"].barrier(dist.BarrierOptions()).wait()
        else:
            group.call(lambda on: on.barrier(dist.BarrierOptions()))
        passed = met()
        rings: list[Any] = []
        if way == "mesh":
            rings += [self._ring(column, epoch, token) for column in range(COLUMNS)]
        else:
            with ThreadPoolExecutor(COLUMNS) as pool:
                rings += pool.map(lambda column: self._ring(column, epoch, token), range(COLUMNS))
        opened = met()
        for ring in rings:
            ring.close()
        group.close()
        met()
        return {
            "world": world - began,
            "barrier": passed - world,
            "rings": opened - passed,
            "connections": own / 2 + COLUMNS,
            "most": own + 2 * COLUMNS,
        }

    def _ring(self, column: int, epoch: int, token: Any) -> Any:
        clients: dict[int, PeerStoreClient] = {}
        members = range(len(self.addresses))

        def client_of(member: int) -> PeerStoreClient:
            if member not in clients:
                clients[member] = PeerStoreClient(self.addresses[member], SECRET, epoch)
            return clients[member]

        meeting = Neighbours(self.peer_store, members, client_of, epoch)
        ring = TcpTransport(
            self.rank, members, meeting, token, secret=SECRET, ring=f"ring/{column}/{epoch}", slots=None,
            timeout=TIMEOUT,
        )  # fmt: skip
        for client in clients.values():
            client.close()
        return ring


def opened(member: Member, way: str, epoch: int, met: Callable[[], float]) -> dict[str, float]:
    """Call ``Member.open``; if it fails, exit the process, so that other members do not wait for this member."""
    try:
        return member.open(way, epoch, met)
    except BaseException:  # noqa: BLE001  other members would wait for this member
        traceback.print_exc()
        os._exit(1)


def one_process(shares: list[range], ways: list[str], port: int, barrier: Any, number: int, report: TextIO) -> None:
    """Run the members of process ``number``; for each of ``ways``, write a line with the results of these members."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    shared = dist.TCPStore("127.0.0.1", port, is_master=False)
    members = [Member(rank) for rank in shares[number]]
    for member in members:
        shared.set(str(member.rank), member.peer_store.address)
    addresses = [shared.get(str(rank)).decode() for rank in range(sum(map(len, shares)))]
    for member in members:
        member.addresses = addresses
    for epoch, way in enumerate(ways, start=1):
        at = [0.0]

        def action(at: list[float] = at) -> None:
            barrier.wait(TIMEOUT)
            at[0] = time.perf_counter()

        here = threading.Barrier(len(members), action)

        def met(here: threading.Barrier = here, at: list[float] = at) -> float:
            here.wait(TIMEOUT)
            return at[0]

        with ThreadPoolExecutor(len(members)) as pool:
            found = [one.result() for one in [pool.submit(opened, member, way, epoch, met) for member in members]]
        print(json.dumps(found), file=report)


def measured(size: int, processes: int, ways: list[str]) -> list[dict[str, float]]:
    """Measure each of ``ways`` with ``size`` members in ``processes`` processes; return a row for each."""
    shares = [range(n, size, processes) for n in range(min(processes, size))]
    barrier = FORK.Barrier(len(shares))
    with store() as port:
        by_process = reported(len(shares), partial(one_process, shares, ways, port, barrier))
    rows = []
    for parts in zip(*by_process, strict=True):
        found = [found_ for part in parts for found_ in part]
        most = {name: max(found_[name] for found_ in found) for name in found[0]}
        rows.append(most | {"connections": sum(found_["connections"] for found_ in found)})
    return rows


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--members", nargs="+", type=int, default=[8, 64, 256, 1024])
    parser.add_argument("--processes", type=int, default=4)
    options = parser.parse_args()
    head("members:", "way", "world s:", "barrier s:", "rings s:", "connections:", "most:")
    table = []
    for size in options.members:
        ways = ["tree", *(["mesh"] if size <= MOST_IN_A_MESH else [])]
        # The first round is not counted, because it imports modules and starts threads.
        rows = dict(zip(ways, measured(size, options.processes, [*ways, *ways])[len(ways) :], strict=True))
        for way in ("mesh", "tree"):
            found_ = rows.get(way)
            seconds = ["" if found_ is None else f"{found_[name]:.3f}" for name in ("world", "barrier", "rings")]
            many = size * (size - 1) / 2 + COLUMNS * size if found_ is None else found_["connections"]
            most = size - 1 + 2 * COLUMNS if found_ is None else found_["most"]
            table.append({"members": size, "way": way, **(found_ or {})})
            row(size, way, *seconds, f"{many:.0f}", f"{most:.0f}")
    print(f"\n{load_average()}")
    write(options, table)


if __name__ == "__main__":
    main()
