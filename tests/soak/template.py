"""Forks the soak's workers: torch and Megatron are imported once for a thousand of them.

    recover-run --starts--> paced.py, a stand-in --its arguments, environment, output--> template --fork--> the worker
                            waits, ends as it ended <------------- exit code -----------

Whoever of the two is killed, the other ends at once. The worker is the one to kill: its pid is in
SOAK_FOLDER/pids/PID-OF-THE-STAND-IN. The template starts no thread, so it may always fork.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from tests.harness.processes import end_with

LIMIT = 1 << 20
"""Bytes of one request."""


def stand_in(folder: Path) -> int:
    """Have a worker forked in this process's place, and wait for it; its exit code, or minus its signal."""
    with socket.socket(socket.AF_UNIX) as template:
        template.connect(str(folder / "template.sock"))
        request = {"argv": sys.argv, "environment": dict(os.environ), "pid": os.getpid(), "cwd": os.getcwd()}
        data = json.dumps(request).encode()
        socket.send_fds(template, [len(data).to_bytes(4, "big")], [0, 1, 2])
        template.sendall(data)
        with template.makefile("r") as answer:
            return int(answer.readline() or "1")


def end_as(code: int) -> None:
    """End this process with an exit code, or by the signal that it names."""
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def serve(folder: Path, work: Callable[[], None]) -> None:
    """Fork whoever is asked for, until stdin ends."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "template.sock"))
        listener.listen(16)
        children: dict[int, tuple[int, socket.socket]] = {}
        while True:
            ready, _, _ = select.select([sys.stdin, listener, *children], [], [])
            for handle in ready:
                if handle is listener:
                    asking, _ = listener.accept()
                    pid = _fork(folder, asking, [listener, *(each for _, each in children.values())], work)
                    children[os.pidfd_open(pid)] = pid, asking
                elif handle is sys.stdin:
                    return
                else:
                    pid, asking = children.pop(handle)
                    os.close(handle)
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    with asking, contextlib.suppress(OSError):  # it may be gone itself
                        asking.sendall(f"{code}\n".encode())


def _fork(folder: Path, asking: socket.socket, others: list[socket.socket], work: Callable[[], None]) -> int:
    head, outputs, _, _ = socket.recv_fds(asking, 4, 3)
    data, size = b"", int.from_bytes(head, "big")
    if size > LIMIT:
        raise ValueError(f"a request of {size} bytes")
    while len(data) < size:
        data += asking.recv(size - len(data))
    request = json.loads(data)
    if pid := os.fork():
        for output in outputs:
            os.close(output)
        (folder / "pids").mkdir(exist_ok=True)
        (folder / "pids" / str(request["pid"])).write_text(str(pid))
        return pid
    for each in (asking, *others):
        each.close()
    _become(request, outputs, work)


def _become(request: dict[str, object], outputs: list[int], work: Callable[[], None]) -> None:
    def become() -> None:
        _die_with(int(str(request["pid"])))
        os.setsid()
        for number, output in enumerate(outputs):
            os.dup2(output, number)
            os.close(output)
        os.environ.clear()
        os.environ.update(request["environment"])  # type: ignore[call-overload]
        os.chdir(str(request["cwd"]))
        sys.argv = list(request["argv"])  # type: ignore[call-overload]
        work()

    end_with(become)


def _die_with(pid: int) -> None:
    """Be killed when that process, which is not the parent, ends."""
    handle = os.pidfd_open(pid)

    def watch() -> None:
        select.select([handle], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def own_shared_memory() -> None:
    """Where that is permitted, have a /dev/shm that nobody else on this machine leaves anything in."""
    try:
        os.unshare(os.CLONE_NEWNS)
    except PermissionError:
        return
    for how in (["--make-rprivate", "/"], ["-t", "tmpfs", "tmpfs", "/dev/shm"]):
        subprocess.run(["mount", *how], check=True)


def main() -> None:
    """Import, say so on stdout, then serve."""
    own_shared_memory()
    from recover_megatron.arguments import RecoverConfig
    from recover_megatron.megatron_hooks.entry.program import load
    from tests.harness.server import prepare_megatron
    from tests.soak.paced import work

    load(RecoverConfig(enabled=True, device="cpu"))
    import recover_megatron.megatron_hooks.entry.fault_tolerance  # noqa: F401

    prepare_megatron()
    gc.freeze()
    print("ready", flush=True)
    serve(Path(sys.argv[1]), work)


if __name__ == "__main__":
    main()
