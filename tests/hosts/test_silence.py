"""Roads between hosts of the tests that break, and are mended, as told: who waits on them is woken, and no other."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from recover_megatron.collectives.peers import unreached
from recover_megatron.network.system import Watch
from tests.harness.patience import patient
from tests.harness.waiting import DEADLINE

from .hosts import SWITCH, Hosts


def on[T](hosts: Hosts, host: int, do: Callable[[], T]) -> T:
    """Run ``do`` in the network of a host: sockets that it makes stay there."""
    results: list[T] = []

    def run() -> None:
        with open(hosts.network(host)) as network:
            os.setns(network.fileno(), os.CLONE_NEWNET)
        results.append(do())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(DEADLINE)
    return results[0]


def listener(hosts: Hosts, host: int) -> socket.socket:
    return on(hosts, host, lambda: socket.create_server((hosts.address(host), 0)))


def connection(hosts: Hosts, one: int, other: int) -> tuple[socket.socket, socket.socket]:
    """The ends of one between two hosts."""
    with listener(hosts, other) as ring_listener:
        address = ring_listener.getsockname()
        here = on(hosts, one, lambda: socket.create_connection(address, DEADLINE))
        there, _ = ring_listener.accept()
    for sock in (here, there):
        sock.settimeout(DEADLINE)
    return here, there


def fill(sock: socket.socket) -> None:
    """Send as much as the other side's kernel takes while its process reads nothing, and some more."""
    sock.setblocking(False)
    try:
        while True:
            sock.send(bytes(1 << 16))
    except BlockingIOError:
        sock.settimeout(DEADLINE)


def woken(sock: socket.socket) -> bool:
    """Whether a wait for data ends other than by the test's own time."""
    try:
        return sock.recv(1) == b""
    except TimeoutError as error:
        return error.errno is not None  # the kernel's word; the socket's own timeout has no number
    except OSError:
        return True


@pytest.mark.slow
@pytest.mark.parametrize("how", ["part", "refuse", "cable"])
def test_whoever_waits_on_a_broken_road_is_woken_and_on_others_nobody(three_hosts: Hosts, how: str) -> None:
    hosts, watch = three_hosts, Watch()
    idle, sending, unread = connection(hosts, 2, 3), connection(hosts, 2, 3), connection(hosts, 1, 2)
    for pair in (idle, sending, unread):
        for sock in pair:
            watch.watch(sock)
    fill(unread[0])
    if how == "part":
        hosts.part(2, 3)
    elif how == "refuse":
        hosts.refuse(2, 3)
    else:
        hosts.cable(3, up=False)
    sending[0].sendall(b"lost")
    sending[1].sendall(b"lost, too")
    assert woken(sending[0])
    assert woken(sending[1])
    assert woken(idle[0])
    assert woken(idle[1])
    assert not watch.is_silent(unread[0])
    unread[1].setblocking(False)
    assert unread[1].recv(1) == b"\0"  # it is as it was
    for pair in (idle, sending, unread):
        for sock in pair:
            sock.close()


@pytest.mark.slow
def test_trying_tells_the_roads_that_stay_broken_from_those_that_come_back(three_hosts: Hosts) -> None:
    hosts = three_hosts
    listeners = {host: listener(hosts, host) for host in (1, 2)}
    addresses = {
        host: f"{hosts.address(host)} {ring_listener.getsockname()[1]}" for host, ring_listener in listeners.items()
    }
    try:
        hosts.refuse(2, 3)
        assert on(hosts, 3, lambda: unreached(addresses, patient(2))) == {2}
        assert on(hosts, 3, lambda: unreached(addresses, DEADLINE, gone=lambda: [2])) == set()
        back = threading.Timer(1.0, hosts.mend)
        back.start()
        assert on(hosts, 3, lambda: unreached(addresses, DEADLINE)) == set()
        back.join()
    finally:
        for ring_listener in listeners.values():
            ring_listener.close()


LISTEN = "import socket; s = socket.create_server(('', 4000)); print('listening', flush=True)\nwhile True: s.accept()"
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], 4000), float(sys.argv[2]))"
LONG, SHORT = DEADLINE, 1


def connects(hosts: Hosts, host: int, other: int, folder: Path, seconds: float) -> bool:
    command = [sys.executable, "-c", CONNECT, hosts.address(other), seconds]
    return hosts.start(host, command, folder / "connect.out").wait() == 0


@pytest.mark.slow
def test_roads_break_and_are_mended_as_told(three_hosts: Hosts, tmp_path: Path) -> None:
    hosts = three_hosts
    for host in hosts:
        out = tmp_path / f"listen{host}.out"
        listener = hosts.start(host, [sys.executable, "-c", LISTEN], out)
        while "listening" not in out.read_text():
            assert listener.poll() is None, out.read_text()
            time.sleep(0.02)

    def hear(*pairs: tuple[int, int]) -> bool:
        return all(connects(hosts, *pair, tmp_path, LONG) for pair in pairs)

    def deaf(*pairs: tuple[int, int]) -> bool:
        return not any(connects(hosts, *pair, tmp_path, SHORT) for pair in pairs)

    hosts.part(2, 3)
    assert deaf((2, 3), (3, 2))
    assert hear((1, 2), (3, 1))
    hosts.mend()
    hosts.refuse(1, 2)
    assert deaf((1, 2), (2, 1))
    assert hear((2, 3), (1, 3))
    hosts.mend()
    hosts.cable(3, up=False)
    assert deaf((1, 3), (3, 2))
    assert hear((1, 2))
    hosts.mend()
    assert hear((1, 3))


def test_a_host_has_its_own_name_shared_memory_and_processes(three_hosts: Hosts, tmp_path: Path) -> None:
    hosts = three_hosts
    script = "hostname; ls /dev/shm | wc -l; cat /etc/hosts; touch /dev/shm/mine; ls /proc | grep -c '^[0-9]'"
    told = []
    for host in hosts:
        assert hosts.start(host, ["bash", "-c", script], tmp_path / "out").wait(DEADLINE) == 0
        told.append((tmp_path / "out").read_text().split("\n"))
    assert [lines[0] for lines in told] == [hosts.name(host) for host in hosts]
    assert all(lines[1] == "0" for lines in told)
    assert all(f"{hosts.address(3)} {hosts.name(3)}" in lines for lines in told)
    assert all(int(lines[-2]) < 10 for lines in told)
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    assert hosts.network(SWITCH).rpartition("/")[2] in spaces.stdout
