"""The hosts of the tests are what they are said to be: roads break, and are mended, as told."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.harness.waiting import DEADLINE

from .hosts import SWITCH, Hosts

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
