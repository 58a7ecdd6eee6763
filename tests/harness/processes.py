"""Commands that are run to their end, facts of the process table, and ports that nobody uses."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest

from recover_megatron.network.event_loop import is_ready
from tests.harness import REPOSITORY
from tests.harness.patience import patient

_chosen: list[socket.socket] = []
"""One bound for each port that was given away, as long as this process lives."""


def finished(
    *command: object,
    seconds: float = 120,
    cwd: Path | str | None = None,
    path: object = REPOSITORY,
    clean: bool = False,
    stdout: int = subprocess.PIPE,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, in a session of its own, with nothing to read; what it has started ends with it.

    ``seconds``: of an idle machine. ``path``: its PYTHONPATH. ``clean``: of this process's variables it has no RECOVER_
    ones. Raises subprocess.TimeoutExpired.
    """
    words = list(map(str, command))
    variables = {name: value for name, value in os.environ.items() if not (clean and name.startswith("RECOVER_"))}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": stdout, "stderr": subprocess.PIPE}
    environment = {**variables, "PYTHONPATH": str(path), **environment}
    with subprocess.Popen(words, text=True, cwd=cwd, env=environment, start_new_session=True, **pipes) as process:
        try:
            out, err = process.communicate(timeout=patient(seconds))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def python(*arguments: object, **how: Any) -> subprocess.CompletedProcess[str]:
    """The same for this interpreter."""
    return finished(sys.executable, *arguments, **how)


def mount(*words: object) -> None:
    """Mount a file system; the test is skipped where that is not allowed, and fails where it is and does not work."""
    done = finished("mount", *words, LC_ALL="C")
    if re.search("permission denied|superuser|not permitted", done.stderr):
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr


def kill_first_candidate(logs: Path) -> None:
    """Of the run in this folder: the coordinator that leads first."""
    for pid in finished("pgrep", "-f", logs / "events-0.jsonl").stdout.split():
        os.kill(int(pid), signal.SIGKILL)


def _state(pid: int) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status()
    return psutil.STATUS_DEAD


def alive(pid: int) -> bool:
    """Whether ``pid`` exists and is more than a zombie."""
    return _state(pid) not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def stopped(pid: int) -> bool:
    """Whether all of ``pid`` stands still, by SIGSTOP or since it has ended."""
    return _state(pid) == psutil.STATUS_STOPPED or not alive(pid)


def ends_within(child: int, seconds: float) -> bool:
    """Whether a child of this process ends in so many seconds of an idle machine; it stays to be waited for."""
    handle = os.pidfd_open(child)
    try:
        return is_ready(handle, patient(seconds))
    finally:
        os.close(handle)


def end_with(work: Callable[[], object]) -> NoReturn:
    """End this process, a fork, as Python ends a script that does ``work``.

    What the parent has registered for its own end is left alone.
    """
    code = 1
    try:
        work()
        code = 0
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except BaseException:  # noqa: BLE001  the whole worker: its log and its exit code say what happened
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def environment(pid: int) -> dict[str, str]:
    """That with which a living process was started; empty if it has ended.

    Not by psutil, which reads to the first gap: a program that writes a title over its arguments leaves some.
    """
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/environ").read_text(errors="replace")
        return dict(entry.partition("=")[::2] for entry in text.split("\0") if "=" in entry)
    return {}


def processes_with(entry: str) -> list[int]:
    """Living processes whose initial environment has ``entry`` (NAME=value)."""
    name, _, value = entry.partition("=")
    return [pid for pid in psutil.pids() if environment(pid).get(name) == value and alive(pid)]


def children(pid: int, all_below: bool = False) -> list[int]:
    """Living children of ``pid``, or also those of its children."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(pid).children(all_below) if alive(child.pid)]
    return []


def command_line(pid: int) -> list[str]:
    """Its words; none of a process that has ended."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).cmdline()
    return []


def free_ports(count: int) -> list[int]:
    """Consecutive ports of 127.0.0.1 that nobody listens on, below those that the kernel gives away by itself.

    Nobody has them until they are used: each process of a test run (pytest -n) takes them from a range of its own, and
    none twice.  A name of the kernel's for each keeps them from another run of the tests on this machine.
    """
    lowest = 20000 + 3000 * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 4)
    for _ in range(1000):
        first, names = random.SystemRandom().randrange(lowest, lowest + 3000 - count), []
        with contextlib.ExitStack() as held:
            try:
                for port in range(first, first + count):
                    name = held.enter_context(socket.socket(socket.AF_UNIX))
                    name.bind(f"\0recover test port {port}")
                    names.append(name.dup())
                    held.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                for name in names:
                    name.close()
                continue
            _chosen.extend(names)
            return list(range(first, first + count))
    raise AssertionError("no free ports")


def free_port() -> int:
    """One such port."""
    return free_ports(1)[0]


@contextlib.contextmanager
def closed_port() -> Iterator[int]:
    """A port of 127.0.0.1 where every connection is refused: it is bound, so nobody else comes to listen there."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]
