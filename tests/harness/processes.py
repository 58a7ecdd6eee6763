"""Facts of the process table, and ports that nobody uses."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from pathlib import Path


def alive(pid: int) -> bool:
    """Whether ``pid`` exists and is more than a zombie."""
    with contextlib.suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        return state not in "ZX"
    return False


def processes_with(entry: str) -> list[int]:
    """Living processes whose initial environment has ``entry`` (NAME=value)."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError):
                if entry.encode() in Path(f"/proc/{name}/environ").read_bytes().split(b"\0") and alive(int(name)):
                    found.append(int(name))
    return found


def children(pid: int) -> list[int]:
    """Living children of ``pid``."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{name}/stat").read_text(errors="replace").rpartition(")")[2].split()
                if int(fields[1]) == pid and fields[0] not in "ZX":
                    found.append(int(name))
    return found


def free_ports(count: int) -> list[int]:
    """Consecutive ports of 127.0.0.1 that nobody listens on, below those that the kernel gives away by itself.

    Nobody has them until they are used: each process of a test run (pytest -n) takes them from a range of its own.
    """
    lowest = 20000 + 3000 * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 4)
    for _ in range(1000):
        first = random.SystemRandom().randrange(lowest, lowest + 3000 - count)
        with contextlib.ExitStack() as held:
            try:
                for port in range(first, first + count):
                    held.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            return list(range(first, first + count))
    raise AssertionError("no free ports")


def free_port() -> int:
    """One such port."""
    return free_ports(1)[0]
