"""The parent process of a warm start: it imports once, then forks the workers on the launcher's orders.

::

    LOADING --script loaded, preload(argv) returned--> READY --"start"--> fork --> the worker runs the script
       |--SystemExit or an exception--> "exited"         |---"reap"----> reap it, "reaped"
       `--a thread runs, or CUDA is in use--> "refused"  `--the launcher is gone--> exit

The script is loaded as ``__recover_preload__``, so its ``if __name__ == "__main__"`` does not run, and its function
``preload(argv)``, if it has one, is called with the script's arguments (``sys.argv[1:]``).

Why a thread forbids forking: only the calling thread exists in the child, so a lock another one held stays locked there
for ever.  BLAS libraries start threads when they are imported; the launcher sets OPENBLAS_NUM_THREADS=1 against that.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import NoReturn

from recover_megatron.launch.channel import receive, send
from recover_megatron.launch.plan import WORKER_ID_VARIABLE
from recover_megatron.launch.processes import die_with_parent
from recover_megatron.launch.run_script import Script, load_for_preload, run_as_main


def main() -> None:
    """Arguments: the descriptor of the channel, "script" or "module", then the script and its arguments."""
    channel = socket.socket(fileno=int(sys.argv[2]))
    os.set_inheritable(channel.fileno(), False)
    script = Script(sys.argv[4], is_module=sys.argv[3] == "module")
    sys.argv[:] = sys.argv[4:]
    script.set_path()
    _preload(channel, script)
    reason = why_not_fork()
    if reason:
        send(channel, {"event": "refused", "reason": reason})
        _leave()
    gc.collect()
    gc.freeze()  # the collector would otherwise write into, and so copy, pages that the workers share
    send(channel, {"event": "ready"})
    _serve(channel)
    # Only a worker comes here: below the interpreter's own last frame, so that it ends as every interpreter does.
    run_as_main(script)


def _preload(channel: socket.socket, script: Script) -> None:
    """Load the script and call its preload(); if that ends the process, say so."""
    try:
        preload = load_for_preload(script).get("preload")
        if callable(preload):
            preload(sys.argv[1:])
    except SystemExit as end:
        message, code = "", 1
        if end.code is None or isinstance(end.code, int):
            code = (end.code or 0) & 0xFF
        else:
            message = str(end.code)
        _flush()
        send(channel, {"event": "exited", "code": code, "message": message[:10000]})
        _leave()
    except Exception as error:  # noqa: BLE001 - whatever the script did not catch, as the interpreter
        script.show(error)
        _flush()
        send(channel, {"event": "exited", "code": 1, "message": ""})
        _leave()
    _flush()


def why_not_fork() -> str:
    """The reason against forking this process; empty if there is none."""
    if _holds_a_gpu():
        return "CUDA was initialised while the script was loaded; a forked process cannot use it"
    threads = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if threads:
        return f"the script started threads while it was loaded ({', '.join(threads[:5])})"
    tasks = [task for task in os.listdir("/proc/self/task") if int(task) != os.getpid()]
    if tasks:
        names = sorted({Path(f"/proc/self/task/{task}/comm").read_text(encoding="utf-8").strip() for task in tasks})
        return (
            f"a library started {len(tasks)} native thread(s) ({', '.join(names)}) while the script was loaded; "
            "OPENBLAS_NUM_THREADS=1 or OMP_NUM_THREADS=1 may prevent it"
        )
    return ""


def _holds_a_gpu() -> bool:
    """Whether this process has opened a GPU.  The kernel knows; torch.cuda may be one that stands in for a GPU."""
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith("/dev/nvidia"):
                return True
        except FileNotFoundError:
            continue  # the one that listdir itself used
    return False


def _serve(channel: socket.socket) -> None:
    """Obey until the launcher is gone, which ends the process.  Returns in a forked worker."""
    while True:
        received = receive(channel)
        if received is None:
            _leave()
        message, descriptors = received
        if message["order"] == "start":
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                channel.close()
                _become_worker(parent, message["variables"], descriptors)
                return
            for descriptor in descriptors:
                os.close(descriptor)
            pidfd = os.pidfd_open(pid)
            send(channel, {"event": "started", "worker_id": message["worker_id"], "pid": pid}, (pidfd,))
            os.close(pidfd)
        elif message["order"] == "reap":
            _, status = os.waitpid(message["pid"], 0)
            exit_code = os.waitstatus_to_exitcode(status)
            send(channel, {"event": "reaped", "worker_id": message["worker_id"], "status": exit_code})


def _become_worker(parent: int, variables: dict[str, str | None], output: list[int]) -> None:
    die_with_parent(parent)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.setsid()
    for target, descriptor in enumerate(output, start=1):
        os.dup2(descriptor, target)
        os.close(descriptor)
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _relabel(WORKER_ID_VARIABLE, os.environ[WORKER_ID_VARIABLE])


def _relabel(name: str, value: str) -> None:
    """Write ``value`` into this process's initial environment, in the room that the launcher left for it.

    A forked process shows its parent's /proc/PID/environ.  With its own worker id there, the launcher finds what a dead
    worker left behind, as after a cold start.  Nothing reads these bytes any more: os.environ holds a copy.
    """
    fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    area_start = int(fields[47])  # env_start: field 50 of proc(5), counted from the one after the name
    area = Path("/proc/self/environ").read_bytes()
    entry = f"{name}=".encode()
    at = (b"\0" + area).find(b"\0" + entry) + len(entry)
    room = area.find(b"\0", at) - at
    if at >= len(entry) and room >= len(value):
        ctypes.memmove(area_start + at, value.encode().ljust(room, b"\0"), room)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def _leave() -> NoReturn:
    """End without atexit handlers: what the script registered belongs to the workers."""
    _flush()
    os._exit(0)
