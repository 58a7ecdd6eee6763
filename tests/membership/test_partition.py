"""Partitions between real processes: each node is a network namespace on a bridge; packets vanish, no FIN, no error.

A node is cut off by taking its port off the bridge (both directions), or by giving it a wrong hardware address for the
others (only what it sends is lost). Needs root and network namespaces; skipped loudly where there are none.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster, check_one_lineage, cluster

from tests.harness.waiting import DEADLINE

pytestmark = pytest.mark.slow

TIMES = {
    "heartbeat_interval": 0.2,
    "heartbeat_timeout": 3.0,
    "hang_timeout": 20.0,
    "stall_timeout": 6.0,
    "start_timeout": 60.0,
}


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=DEADLINE)


def can_make_namespaces() -> bool:
    if shutil.which("ip") is None or os.geteuid() != 0:
        return False
    name = f"rmprobe{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, timeout=DEADLINE, check=False).returncode != 0:
        return False
    works = subprocess.run(
        ["ip", "link", "add", name[:15], "type", "bridge"], capture_output=True, timeout=DEADLINE, check=False
    ).returncode
    if works == 0:
        ip("link", "del", name[:15])
    ip("netns", "del", name)
    return works == 0


needs_namespaces = pytest.mark.skipif(
    not can_make_namespaces(),
    reason="PARTITIONS ARE NOT TESTED WITH A REAL NETWORK: this needs root, the ip command and network namespaces",
)


_letters = itertools.cycle("abcdefghijklmnopqrstuvwxyz")  # what was removed may linger for a while under its name


class Network:
    """Nodes 0..n-1 in namespaces, with addresses 10.213.x.(node + 1), on one bridge."""

    def __init__(self, nodes: int) -> None:
        self.tag = f"rm{os.getpid() % 100000}{next(_letters)}"
        self.subnet = f"10.213.{os.getpid() % 250}"
        self.names = [f"{self.tag}n{k}" for k in range(nodes)]

    def build(self) -> None:
        ip("link", "add", f"{self.tag}b", "type", "bridge")
        ip("link", "set", f"{self.tag}b", "up")
        for k, name in enumerate(self.names):
            ip("netns", "add", name)
            ip("link", "add", f"{self.tag}v{k}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", f"{self.tag}v{k}", "master", f"{self.tag}b", "up")
            ip("-n", name, "addr", "add", f"{self.subnet}.{k + 1}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")

    def address(self, node: int) -> str:
        return f"{self.subnet}.{node + 1}"

    def cut(self, node: int) -> None:
        """Both directions."""
        ip("link", "set", f"{self.tag}v{node}", "nomaster")

    def mute(self, node: int) -> None:
        """What the node sends is lost, what is sent to it arrives."""
        for other in range(len(self.names)):
            if other != node:
                wrong = ["lladdr", "02:00:00:00:00:fe", "nud", "permanent", "dev", "eth0"]
                ip("-n", self.names[node], "neigh", "replace", self.address(other), *wrong)

    def remove(self) -> None:
        for k, name in enumerate(self.names):
            subprocess.run(["ip", "link", "del", f"{self.tag}v{k}"], capture_output=True, timeout=DEADLINE, check=False)
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=DEADLINE, check=False)
        subprocess.run(["ip", "link", "del", f"{self.tag}b"], capture_output=True, timeout=DEADLINE, check=False)


@contextlib.contextmanager
def network(nodes: int) -> Iterator[Network]:
    made = Network(nodes)
    try:
        made.build()
        yield made
    finally:
        made.remove()


def start(run: Cluster, net: Network, per_node: list[int], candidates: list[int]) -> dict[int, int]:
    """Workers on nodes, a candidate coordinator on each node of ``candidates``; the node of each worker."""
    names = [net.names[node] for node in candidates]
    run.start_coordinators(sum(per_node), len(candidates), [f"{net.address(n)}:0" for n in candidates], names)
    node_of: dict[int, int] = {}
    for node, count in enumerate(per_node):
        for _ in range(count):
            node_of[len(node_of)] = node
            run.start_worker(len(node_of) - 1, namespace=net.names[node])
    for process in run.workers.values():
        process.event("commit")
    return node_of


@needs_namespaces
@pytest.mark.parametrize("how", ["both directions", pytest.param("what it sends", marks=pytest.mark.slow)])
def test_a_silent_host_is_out_within_the_heartbeat_timeout_and_stops_by_itself(tmp_path: Path, how: str) -> None:
    with cluster(tmp_path, **TIMES) as run, network(3) as net:
        start(run, net, [2, 1, 1], [0])
        (net.cut if how == "both directions" else net.mute)(2)
        run.go_on_without(3)
        fault = run.wait_event("fault", worker=3)
        assert fault["kind"] == "out"
        assert run.workers[3].exit_code() in (11, 13)
        assert not [line for line in run.workers[3].lines if line["event"] == "plan" and line["epoch"] > 1]
        check_one_lineage(run)


@pytest.mark.slow
@needs_namespaces
def test_the_half_with_the_coordinator_goes_on_and_the_other_half_stops(tmp_path: Path) -> None:
    with cluster(tmp_path, **TIMES) as run, network(2) as net:
        start(run, net, [2, 2], [0, 1])
        net.cut(1)
        run.go_on_without(2, 3)
        assert [run.workers[n].exit_code() for n in (2, 3)] == [11, 11]
        check_one_lineage(run)


@needs_namespaces
def test_a_majority_goes_on_when_the_coordinator_is_cut_off_and_the_minority_stops(tmp_path: Path) -> None:
    with cluster(tmp_path, **TIMES) as run, network(3) as net:
        start(run, net, [1, 2, 1], [0, 1, 2])
        net.cut(0)
        run.go_on_without(0)
        assert run.workers[0].exit_code() == 11
        assert run.coordinators[0].exit_code() == 11
        check_one_lineage(run)


@pytest.mark.slow
@needs_namespaces
def test_without_a_majority_nobody_goes_on_when_the_coordinators_host_is_lost(tmp_path: Path) -> None:
    with cluster(tmp_path, **TIMES) as run, network(2) as net:
        start(run, net, [2, 2], [0, 1])
        net.cut(0)  # then its host loses power: nobody on the other side can tell that from a partition
        for process in (run.coordinators[0], run.workers[0], run.workers[1]):
            process.kill()
        assert [run.workers[n].exit_code() for n in (2, 3)] == [11, 11]


class FreezingProxy:
    """Forwards TCP, until it is frozen: then it keeps the connections open and forwards nothing."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = self._server.getsockname()[:2]
        self._frozen = threading.Event()
        self._sockets: list[socket.socket] = [self._server]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._server.accept()
                upstream = socket.create_connection(self._target)
                self._sockets += [client, upstream]
                for a, b in ((client, upstream), (upstream, client)):
                    threading.Thread(target=self._forward, args=(a, b), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):  # closed
            while data := source.recv(65536):
                if self._frozen.is_set():
                    return
                sink.sendall(data)

    def freeze(self) -> None:
        self._frozen.set()

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()


@pytest.mark.slow
def test_a_worker_behind_a_path_that_freezes_is_out_and_stops_by_itself(tmp_path: Path) -> None:
    with cluster(tmp_path, **TIMES) as run:
        run.start_coordinators(3)
        proxy = FreezingProxy(run.addresses[0])
        run.start_worker(0)
        run.start_worker(1)
        run.start_worker(2, addresses=[proxy.address])
        for process in run.workers.values():
            process.event("commit")
        proxy.freeze()
        run.go_on_without(2)
        assert run.workers[2].exit_code() == 11
        proxy.close()
        check_one_lineage(run)
