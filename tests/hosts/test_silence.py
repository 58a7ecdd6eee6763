"""Connections over a road that breaks: whoever waits on them is woken; a process that reads nothing is not silent."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable

import pytest

from recover_megatron.collectives.peers import unreached
from recover_megatron.network.system import Watch
from tests.harness.patience import patient
from tests.harness.waiting import DEADLINE

from .hosts import Hosts

pytestmark = pytest.mark.slow


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
