"""The fork server: imports torch and Megatron, then forks the workers of one run after another, as it is told.

One JSON request a line on stdin, one JSON answer a line on stdout; ``forkserver`` has the client, and the picture.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import runpy
import secrets
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recover_megatron import errors
from recover_megatron.launch.workers.dying import ending
from recover_megatron.launch.workers.processes import kill_found, process_table
from recover_megatron.launch.workers.states import describe_end
from recover_megatron.network.death_notice import DeathWatch
from recover_megatron.network.system import keep_sockets, remove_sockets
from recover_megatron.variables import LAUNCH_ID_VARIABLE
from tests.harness.patience import patient
from tests.harness.processes import end_with, ends_within
from tests.harness.recording import record_losses, record_training, write_before_kills

TELL_VARIABLE = "BENCH_TELL"
"""In the environment of a run with --recover: "pidfd" has its node agent tell of a death by the pidfd alone."""


def _die_with_parent(parent: int) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def _serve_store(listener: socket.socket, workers: int, parent: int) -> None:
    from torch.distributed import TCPStore

    _die_with_parent(parent)
    store = TCPStore("127.0.0.1", listener.getsockname()[1], workers, True, wait_for_workers=False,
                     master_listen_fd=listener.fileno())  # fmt: skip
    signal.pause()
    del store


@dataclass(frozen=True)
class _Worker:
    """One process of a run. ``worker``: its id; ``rank``: where it was launched, or whom it replaces; -1: a spare."""

    worker: int
    rank: int

    def environment(self, request: dict[str, Any]) -> dict[str, str]:
        """What tells it who it is."""
        workers, nodes = request["workers"], request["nodes"]
        local_rank = self.rank if self.rank >= 0 else self.worker
        variables = {
            "RANK": str(max(self.rank, 0)), "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(workers), "LOCAL_WORLD_SIZE": str(workers),
            "RECOVER_NODE_NAME": nodes[self.rank],
        }  # fmt: skip
        if self.worker >= workers:
            variables |= {"RECOVER_WORKER_ID": str(self.worker), "RECOVER_JOIN": "1"}
        if request["networks"]:
            variables |= {"RECOVER_HOST": _address(request, self.rank), "GLOO_SOCKET_IFNAME": "e0"}
        if self.rank < 0:
            variables["RECOVER_SPARE"] = "1"
        if request["spares"] or request["restarts"]:
            variables["RECOVER_REPLACED"] = "1"
        return variables


def _work(who: _Worker, request: dict[str, Any], port: int, parent: int, watch: DeathWatch | None) -> None:
    _die_with_parent(parent)
    os.setsid()
    keep_sockets({LAUNCH_ID_VARIABLE: _sockets_of(parent)})
    _enter(request, who.rank)
    log = os.open(f"{request['log_dir']}/worker-{who.worker}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {
        **who.environment(request),
        "MASTER_ADDR": _address(request, -1), "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
        **(watch.variables if watch is not None else {}), **request["environment"],
    }  # fmt: skip
    sys.argv = request["argv"]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

    MockGPTLowLevelDataset.size = request["documents"]
    if "GLOO_SOCKET_IFNAME" not in os.environ:  # else torch makes devices of that interface
        _share_gloo_threads()
    if "--save" in sys.argv:
        # Megatron starts its checkpoint writer's helper by spawning, which would import everything once more a worker.
        from megatron.core.dist_checkpointing.strategies.filesystem_async import get_write_results_queue

        get_write_results_queue(mp_mode="fork")

    def train() -> None:
        if "--recover" in sys.argv:
            write_before_kills()
        if request["losses"] and who.worker == request["workers"] - 1:
            record_losses(request["losses"])
        if request["training"]:
            record_training(f"{request['training']}/{who.worker}.pt")
        errors.end_process = _returns  # the worker ends below, with what the zygote registered at exit left alone
        runpy.run_path(sys.argv[0], run_name="__main__")
        if "--recover" not in sys.argv:
            _flush_tensorboard()

    end_with(train)


def _returns(code: int = 0) -> None:
    """In place of ``end_process``."""


def _share_gloo_threads() -> None:
    """Have one thread of gloo's serve all groups that are made without options of their own.

    Each group would start one, which wakes a hundred times a second: those of Megatron's groups take as long as a tenth
    of a run of six workers.
    """
    from datetime import timedelta

    from torch.distributed import ProcessGroupGloo

    make, devices = ProcessGroupGloo.__init__, []

    def with_shared_device(self: Any, store: Any, rank: int, size: int, timeout: timedelta | Any, **rest: Any) -> None:
        options = timeout
        if isinstance(timeout, timedelta):
            devices.extend([] if devices else [ProcessGroupGloo.create_default_device()])
            options = ProcessGroupGloo._Options()
            options._timeout, options._devices = timeout, devices
            for name, value in rest.items():  # of newer versions of torch, whose options have it, too
                setattr(options, name, value)
        make(self, store, rank, size, options)

    ProcessGroupGloo.__init__ = with_shared_device


def _flush_tensorboard() -> None:
    """Of a run without --recover: its last numbers are still with the writer's thread, which ends with the process."""
    from megatron.training.global_vars import get_tensorboard_writer

    if (writer := get_tensorboard_writer()) is not None:
        writer.flush()


def _sockets_of(run: int) -> str:
    """The name in the folders of sockets that the workers of a run make; ``run``: the process that started them."""
    return f"forkserver-{run}"


def _kill_left_behind(worker: int) -> None:
    """Kill loader workers, and the checkpoint writer's helper; what tracks their semaphores ends by itself."""
    kill_found(lambda: [process for process in process_table().values() if process.session == worker and process.alive])
    remove_sockets(_sockets_of(os.getpid()), worker)


def _is_stopped(child: int) -> bool:
    """Whether it has been stopped since the last call."""
    with contextlib.suppress(ChildProcessError):  # it has ended
        return os.waitid(os.P_PID, child, os.WSTOPPED | os.WNOHANG) is not None
    return False


Ended = Callable[[int, int], int | None]
"""Told the pid and the exit code of a worker that has ended; returns the pid of one started in its place, or None."""


def _wait_for_all(
    children: dict[int, _Worker],
    timeout: float,
    together: bool,
    ended: Ended = lambda pid, code: None,
    late: Callable[[_Worker], bool] | None = None,
    dies: Callable[[_Worker], None] | None = None,
) -> dict[int, int]:
    """The exit codes by worker id; ends the others when the time is up or, ``together``, when one fails.

    ``children``: by pid; ``ended`` adds those that it starts. Whoever is ``late`` is ended.

    ``dies``: told of a worker that is stopped.  That one stands for a process that SIGKILL was sent to and that the
    kernel is still taking apart: it runs no more, and its connections stay open, here until all others have ended.
    """
    deadline = time.monotonic() + timeout
    codes: dict[int, int] = {}
    handles = {os.pidfd_open(pid): pid for pid in children}
    dying = set[int]()
    while handles:
        for pid in [*handles.values()] if dies is not None else ():
            if pid not in dying and _is_stopped(pid):
                dying.add(pid)
                dies(children[pid])
        if dying.issuperset(handles.values()):
            for pid in dying & {*handles.values()}:
                os.kill(pid, signal.SIGKILL)
        left = max(0.0, deadline - time.monotonic())
        look = 0.2 if dies is None else 0.01
        ready, _, _ = select.select(list(handles), [], [], left if late is None else min(left, look))
        for handle in ready:
            pid = handles.pop(handle)
            os.close(handle)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            codes[children[pid].worker] = code
            _kill_left_behind(pid)
            if (successor := ended(pid, code)) is not None:
                handles[os.pidfd_open(successor)] = successor
        for pid in handles.values() if late is not None else ():
            if late(children[pid]):
                os.kill(pid, signal.SIGKILL)
        if (not ready and time.monotonic() >= deadline) or (together and any(codes.values())):
            for pid in handles.values():
                os.kill(pid, signal.SIGKILL)
            deadline = time.monotonic() + patient(60)
    return codes


def _coordinate(listener: socket.socket, request: dict[str, Any], secret: str, parent: int) -> None:
    """Be the coordinator of a run: in a process of its own."""
    from recover_megatron.arguments import config_from_argv
    from recover_megatron.membership.__main__ import main as coordinator

    _die_with_parent(parent)
    os.environ["RECOVER_SECRET"] = secret
    config = config_from_argv(request["argv"][1:])
    log = os.open(f"{request['log_dir']}/coordinator.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 2)
    options = ["--world", str(request["workers"]), "--listen-fd", str(listener.fileno())]
    options += ["--events", f"{request['log_dir']}/events-0.jsonl"]
    for name in ("heartbeat_interval", "heartbeat_timeout", "hang_timeout", "stall_timeout", "grace", "min_replicas"):
        options += [f"--{name.replace('_', '-')}", str(getattr(config, name))]
    coordinator(options)


def _listener(request: dict[str, Any]) -> socket.socket:
    return socket.create_server(("" if request["networks"] else "127.0.0.1", 0), backlog=256)


def _address(request: dict[str, Any], rank: int) -> str:
    """Where the others reach a rank; -1: the store and the coordinator."""
    return request["networks"][rank][1] if request["networks"] else "127.0.0.1"


def _enter(request: dict[str, Any], rank: int) -> None:
    """Be in the network of a rank (-1: as above) from now on, with all that this process starts."""
    if request["networks"]:
        with open(request["networks"][rank][0]) as network:
            os.setns(network.fileno(), os.CLONE_NEWNET)


def _fork(run: Callable[[], None]) -> int:
    if (pid := os.fork()) == 0:
        try:
            run()
        finally:
            os._exit(0)
    return pid


class _Recovering:
    """The launcher's part in a run with --recover: node agent of all its workers, and it starts others.

    ``watches``: by pid; ``start`` adds that of the worker it starts.
    """

    def __init__(
        self,
        request: dict[str, Any],
        children: dict[int, _Worker],
        watches: dict[int, DeathWatch],
        start: Callable[[_Worker], int],
        address: Any,
    ) -> None:
        from recover_megatron.membership.sides.node_agent import NodeAgent
        from recover_megatron.membership.wire import Secret

        self._children, self._watches, self._start = children, watches, start
        self._workers, self._restarts = request["workers"], request["restarts"]
        self._next = self._workers + request["spares"]
        secret = Secret(request["environment"]["RECOVER_SECRET"].encode())
        self._node_agent = NodeAgent([address], "node", secret, self)
        for pid in children:
            self._watch(pid)

    def _watch(self, pid: int) -> None:
        if pid in self._watches:
            self._watches[pid].begin(lambda: self._dying(pid))

    def _dying(self, pid: int) -> None:
        """Do as recover-run does while a run is under way: kill the process group, then tell the coordinator."""
        if self._node_agent.planned and self._node_agent.out is None and not self._watches[pid].left:
            how = ending(pid).how
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            self._node_agent.ended(self._children[pid].worker, how)

    def evict(self, worker: int, reason: str) -> None:
        pids = [pid for pid, who in self._children.copy().items() if who.worker == worker]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pids[0], signal.SIGKILL)

    def of_no_interest(self, *told: object) -> None:
        """What else a node agent tells its launcher."""

    epoch_wanted = epoch_formed = noted = said = may_host = draining = of_no_interest

    def ended(self, pid: int, code: int) -> int | None:
        """Tell the coordinator; start another in its place, unless the run is over."""
        who = self._children[pid]
        if pid in self._watches:
            self._watches[pid].close()
        # The launcher's own words: the coordinator knows by them whether a process has ended in order.
        how = describe_end(None, -code) if code < 0 else describe_end(code, None)
        self._node_agent.ended(who.worker, how)
        if code == 0 or not self._restarts or self._node_agent.out is not None:
            return None
        self._restarts -= 1
        self._next += 1
        self._watch(successor := self._start(_Worker(self._next - 1, who.rank)))
        return successor

    def dies(self, who: _Worker) -> None:
        """Tell the coordinator of an end before the kernel has closed anything."""
        self._node_agent.ended(who.worker, describe_end(None, signal.SIGKILL))
        (leader,) = [pid for pid, its in self._children.items() if its is who]
        kill_found(lambda: [p for p in process_table().values() if p.session == leader != p.pid and p.alive])

    def let_end(self, coordinator: int, begun: bool) -> None:
        """Return when the coordinator has ended, after the run, and has written its events: it does so at its end.

        That of a run that has not begun waits for workers: it is told to end.  ``begun``: whether it has for certain.
        """
        begun = begun or bool(self._node_agent.planned) or self._node_agent.out is not None
        if not (begun and ends_within(coordinator, 60)):
            os.kill(coordinator, signal.SIGTERM)
            ends_within(coordinator, 60)

    def late(self, who: _Worker) -> bool:
        """Whether the run is over before this one was in any plan: nobody will tell it."""
        over = self._node_agent.out is not None
        return over and who.worker >= self._workers and who.worker not in self._node_agent.planned


def _serve_run(request: dict[str, Any]) -> dict[int, int]:
    """In a process of its own: start everything, wait for the workers, end the rest; the exit codes by worker id."""
    me, workers = os.getpid(), request["workers"]
    _enter(request, -1)
    recover = "--recover" in request["argv"]
    helpers: list[int] = []
    children: dict[int, _Worker] = {}
    watches: dict[int, DeathWatch] = {}
    with _listener(request) as for_store, _listener(request) as for_coordinator:
        port = for_store.getsockname()[1]
        helpers.append(_fork(lambda: _serve_store(for_store, workers, me)))
        if recover:
            secret, address = secrets.token_hex(32), (_address(request, -1), for_coordinator.getsockname()[1])
            helpers.append(_fork(lambda: _coordinate(for_coordinator, request, secret, me)))
            request["environment"] = {
                "RECOVER_COORDINATOR": f"{address[0]}:{address[1]}", "RECOVER_SECRET": secret,
                "RECOVER_NODE_AGENT": "node",
                **request["environment"],
            }  # fmt: skip

    def start(who: _Worker) -> int:
        watch = DeathWatch.make() if recover and request["environment"].get(TELL_VARIABLE) != "pidfd" else None
        pid = _fork(lambda: _work(who, request, port, me, watch))
        children[pid] = who
        if watch is not None:
            watches[pid] = watch
        return pid

    for rank in range(workers):
        start(_Worker(rank, rank))
    for spare in range(request["spares"] if recover else 0):
        start(_Worker(workers + spare, -1))
    if recover:
        recovering = _Recovering(request, children, watches, start, address)
        dies = recovering.dies if request["lingering"] else None
        codes = _wait_for_all(children, request["timeout"], False, recovering.ended, recovering.late, dies)
        recovering.let_end(helpers[-1], begun=0 in codes.values())
    else:
        codes = _wait_for_all(children, request["timeout"], request["together"])
    for helper in helpers:
        os.kill(helper, signal.SIGKILL)
        os.waitpid(helper, 0)
    return codes


def _in_a_child(request: dict[str, Any]) -> dict[str, int]:
    """Serve a run in a child: the server itself never starts a thread, so it may always fork."""
    reading, writing = os.pipe()
    me = os.getpid()

    def serve() -> None:
        _die_with_parent(me)
        try:
            os.write(writing, json.dumps(_serve_run(request)).encode())
        except BaseException:  # noqa: BLE001  the client sees that there is no answer
            traceback.print_exc()

    pid = _fork(serve)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(pid, 0)
    return json.loads(answer)


def prepare_megatron() -> None:
    """Do once what each worker would do again at its start: read the help of Megatron's flags (``load`` keeps it)."""
    import argparse

    from megatron.training.arguments import add_megatron_arguments

    add_megatron_arguments(argparse.ArgumentParser())


def main() -> None:
    """Import, then serve until stdin ends."""
    import gc

    from recover_megatron.arguments import RecoverConfig
    from recover_megatron.megatron_hooks.entry.program import load

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Megatron prints while importing is no answer
    load(RecoverConfig(enabled=True, device="cpu"))
    import recover_megatron.megatron_hooks.entry.fault_tolerance  # noqa: F401

    prepare_megatron()
    gc.freeze()
    for line in sys.stdin:
        answers.write(json.dumps({"codes": _in_a_child(json.loads(line))}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
