"""Real workers, real deaths: runs one scenario after another in processes forked from a parent that imported torch.

    client (pytest) --scenario, pickled--> server --fork--> worker 0 .. N-1
                    <--outcome, pickled---   the server is the membership of a scenario: it sees a worker's end
                                                 (pidfd), pushes the revocation to the others, and when all that live
                                                 have joined, opens the next epoch among them

Worker w's gradient of bucket b is a pure function of (w, b, seed), so the test computes every sum for itself.  A worker
that dies leaves gradients behind: with ``rerun`` the first survivor accumulates them into what is LOCAL, as the
recovery of an iteration does.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import pickle
import queue
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from recover_megatron.collectives.epoch import CancelToken, EpochRevoked
from recover_megatron.collectives.group import Group
from recover_megatron.collectives.group_factory import open_group, progress_thread
from recover_megatron.collectives.ledger import Bucket, Span
from recover_megatron.collectives.nccl import library as libraries
from recover_megatron.collectives.nccl.renewal import Keeper
from recover_megatron.collectives.progress import Handle
from recover_megatron.collectives.ring.executor import Tuning
from tests.collectives.together import DEADLINE, PlainEpoch
from tests.doubles.nccl import library as nccl_double

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass
class Fault:
    """Worker ``worker`` suffers ``how`` at its ``at``-th boundary (from 1; 0: before it opens its first group)."""

    worker: int
    at: int
    how: str = "kill"
    """``kill``, or ``stop``: the membership finds it out at once and revokes."""


@dataclass
class Scenario:
    workers: int
    sizes: list[int]
    op: str = "all_reduce"
    dtype: str = "float32"
    shadows: int = 0
    transport_kind: str = "tcp"
    collective: str = "ring"
    nccl: dict[str, Any] = field(default_factory=dict)
    """What NCCL's double is made with."""
    segment_bytes: int = 256
    depth: int = 3
    rerun: bool = True
    announce: bool = True
    """Whether the membership pushes revocations at all; without, only the ring's own notice of a death is left."""
    children: bool = False
    """Whether each worker has a child, forked with its connections open, that outlives it."""
    faults: list[Fault] = field(default_factory=list)
    seed: int = 0


@dataclass
class Result:
    """What a survivor ended with."""

    worker: int
    buckets: list[torch.Tensor]
    reduced: list[list[tuple[int, int, int]]]
    """Per bucket (start, stop, epoch)."""
    holds: list[int]
    """Whose gradients its own contribution contains."""
    boundaries: int
    """How many boundaries it passed."""
    revoked: set[int]
    """The epochs in which it raised EpochRevoked."""
    descriptors: tuple[int, int]
    """Open descriptors before its first group and after its last."""


@dataclass
class Outcome:
    results: list[Result]
    epochs: dict[int, list[int]]
    """Members of each epoch that was opened."""
    ended: set[int]
    """The workers whose end the membership noticed."""
    problems: list[str]


def gradient(worker: int, bucket: int, numel: int, scenario: Scenario) -> torch.Tensor:
    """A worker's gradient: small integers, so every sum is exact in every type."""
    generator = torch.Generator().manual_seed(1000003 * scenario.seed + 1009 * bucket + worker)
    return torch.randint(-8, 8, (numel,), generator=generator).to(getattr(torch, scenario.dtype))


class Crew:
    """The client's side; use as a context manager."""

    def __init__(self) -> None:
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from tests.collectives.crew import main; main()"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment,
        )  # fmt: skip

    def run(self, scenario: Scenario) -> Outcome:
        """Carry out a scenario.  AssertionError when a worker failed or hung: with what all of them said."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump(scenario, self._process.stdin)
        self._process.stdin.flush()
        outcome: Outcome = pickle.load(self._process.stdout)  # noqa: S301  of our own process
        assert not outcome.problems, "\n".join([str(scenario), *outcome.problems])
        return outcome

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(DEADLINE)


# ---- a worker ----------------------------------------------------------------------------------------------------


class Worker:
    def __init__(self, me: int, scenario: Scenario, control: socket.socket, store: str) -> None:
        self.me = me
        self.scenario = scenario
        self.control = control
        self.store = dist.FileStore(store, -1)
        self.boundaries = 0
        self.holds = [me]
        self.revoked: set[int] = set()
        self.orders: queue.Queue[dict[str, Any]] = queue.Queue()
        self.epoch = PlainEpoch(0, [], me)
        self.all_heard = threading.Event()
        self.buckets = [Bucket(gradient(me, at, size, scenario)) for at, size in enumerate(scenario.sizes)]
        if scenario.op == "all_gather":  # after an optimizer's step each worker's shard is final
            for bucket in self.buckets:
                numel, size = bucket.ledger.numel, scenario.workers
                bucket.ledger.mark(Span(me * numel // size, (me + 1) * numel // size), 1)
        self.communicators = Keeper()
        if scenario.collective == "native":
            made = nccl_double(**scenario.nccl, seed=scenario.seed)
            libraries.load = lambda: made
        self.descriptors = len(os.listdir("/proc/self/fd"))

    def say(self, **message: Any) -> None:
        self.control.sendall(json.dumps(message).encode() + b"\n")

    def listen(self) -> None:
        """The thread that receives orders; a revocation takes effect here, at once."""
        for line in self.control.makefile():
            order = json.loads(line)
            if order["order"] == "revoke":
                self.epoch.revoke("a worker died")
                self.say(heard=self.epoch.number)
            elif order["order"] == "all_heard":
                self.all_heard.set()
            else:
                if order["order"] == "epoch":
                    self.all_heard.set()
                    self.all_heard = threading.Event()
                    self.epoch = PlainEpoch(order["number"], order["members"], self.me)
                self.orders.put(order)

    def boundary(self, *_: object) -> None:
        self.boundaries += 1
        self.suffer(self.boundaries)

    def suffer(self, at: int) -> None:
        for fault in self.scenario.faults:
            if fault.worker == self.me and fault.at == at:
                self.say(fault=fault.how)
                os.kill(os.getpid(), signal.SIGKILL if fault.how == "kill" else signal.SIGSTOP)

    def open(self) -> Group:
        s, all_heard, number = self.scenario, self.all_heard, self.epoch.number

        def heard() -> None:
            self.say(asks=number)
            all_heard.wait()

        token = CancelToken(number, heard)
        self.epoch.on_revoke(token.cancel)
        progress = progress_thread(token, torch.device("cpu"), "sums", s.collective)
        return open_group(
            self.epoch, self.store, name="column", secret=b"the crew's secret", timeout=DEADLINE,
            transport_kind=s.transport_kind, collective=s.collective, hook=self.boundary,
            tuning=Tuning(s.segment_bytes, 16, s.depth), communicators=self.communicators,
            progress=progress,
        )  # fmt: skip

    def between(self) -> None:
        """A native group has few boundaries of its own: those between its buckets count, too."""
        if self.scenario.collective == "native":
            self.boundary()

    def start(self, group: Group, bucket: Bucket) -> Handle:
        self.between()
        if self.scenario.op == "all_reduce":
            return group.all_reduce(bucket)
        if self.scenario.op == "reduce_scatter":
            return group.reduce_scatter(bucket, shadows=range(1, self.scenario.shadows + 1))
        return group.all_gather(bucket)

    def fork_child(self) -> None:
        if (pid := os.fork()) == 0:
            signal.pause()
            os._exit(0)
        self.say(child=pid)

    def run_again(self, orphaned: list[int]) -> None:
        """Accumulate the gradients of the dead into what is LOCAL, as a schedule does: into the whole bucket."""
        for at, bucket in enumerate(self.buckets):
            aside = bucket.save_sums()
            for worker in orphaned:
                bucket.flat.add_(gradient(worker, at, bucket.flat.numel(), self.scenario))
            aside.restore()
        self.holds += orphaned

    def attempt(self, order: dict[str, Any]) -> None:
        """One epoch, up to its end or its revocation."""
        group: Group | None = None
        try:
            group = self.open()
            if self.scenario.children and order["number"] == 1:
                self.fork_child()
            if order["number"] > 1:
                group.pull(self.buckets)
                if self.scenario.rerun and self.scenario.op != "all_gather" and order["members"][0] == self.me:
                    self.run_again(order["orphaned"])
            if self.scenario.op != "all_gather" or order["number"] == 1:
                for handle in [self.start(group, bucket) for bucket in self.buckets]:
                    handle.wait()
                    self.between()
            self.say(done=order["number"], holds=self.holds)
        except EpochRevoked:
            self.revoked.add(order["number"])
            before = [bucket.flat.clone() for bucket in self.buckets]
            ledgers = [bucket.ledger.reduced for bucket in self.buckets]
            if group is not None:
                group.close()
            for bucket, flat, ledger in zip(self.buckets, before, ledgers, strict=True):
                assert torch.equal(bucket.flat, flat), "a bucket changed after EpochRevoked"
                assert bucket.ledger.reduced == ledger, "a ledger changed after EpochRevoked"
            self.say(joined=order["number"], holds=self.holds)
            return
        following = self.orders.get()  # with the group still open, as a worker waits for the commit
        group.close()
        self.orders.put(following)

    def work(self) -> None:
        threading.Thread(target=self.listen, daemon=True).start()
        self.suffer(0)
        while True:
            order = self.orders.get()
            if order["order"] == "finish":
                return self.report()
            self.attempt(order)

    def report(self) -> None:
        result = Result(
            self.me, [bucket.flat for bucket in self.buckets],
            [[(s.start, s.stop, s.epoch) for s in bucket.ledger.reduced] for bucket in self.buckets], self.holds,
            self.boundaries, self.revoked, (self.descriptors, len(os.listdir("/proc/self/fd"))),
        )  # fmt: skip
        self.say(result=pickle.dumps(result).hex())


# ---- the server --------------------------------------------------------------------------------------------------


class Membership:
    """One scenario: starts the workers, sees them die, opens epochs."""

    def __init__(self, scenario: Scenario, folder: str) -> None:
        self.scenario = scenario
        self.folder = folder
        self.controls: dict[int, socket.socket] = {}
        self.heard: dict[int, bytes] = {}
        self.pids, self.handles = dict[int, int](), dict[int, int]()
        self.children: list[int] = []
        self.live, self.joined, self.done = set[int](), set[int](), set[int]()
        self.holds: dict[int, list[int]] = {}
        self.hearing = set[int]()
        self.orphaned: list[int] = []
        self.epoch = 0
        self.formed = True
        self.outcome = Outcome([], {}, set(), [])

    def fork(self, me: int) -> None:
        ours, theirs = socket.socketpair()
        if (pid := os.fork()) == 0:
            code = 1
            try:
                ours.close()
                for other in self.controls.values():
                    other.close()
                log = open(f"{self.folder}/{me}.log", "w")  # noqa: SIM115  the worker's for life
                os.dup2(log.fileno(), 2)
                os.dup2(log.fileno(), 1)
                faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
                Worker(me, self.scenario, theirs, f"{self.folder}/store").work()
                code = 0
            except BaseException:  # noqa: BLE001  the worker's boundary: its log says what happened
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(code)
        theirs.close()
        self.controls[me], self.pids[me], self.handles[me] = ours, pid, os.pidfd_open(pid)
        self.heard[me] = b""
        self.holds[me] = [me]

    def order(self, worker: int, **message: Any) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # dead: its handle tells
            self.controls[worker].sendall(json.dumps(message).encode() + b"\n")

    def run(self) -> Outcome:
        for me in range(self.scenario.workers):
            self.fork(me)
        self.live = set(self.pids)
        self.open_epoch()
        deadline = time.monotonic() + DEADLINE
        while len(self.outcome.results) < len(self.live) and not self.outcome.problems:
            alive = self.live & self.handles.keys()
            sources = [*(self.controls[w] for w in alive), *(self.handles[w] for w in alive)]
            ready, _, _ = select.select(sources, [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                self.give_up()
            for worker in sorted(alive):
                if self.controls[worker] in ready:
                    self.hear(worker)
            for worker in sorted(alive & self.live):
                if self.handles[worker] in ready:
                    self.buried(worker)
            self.proceed()
        self.clean_up()
        return self.outcome

    def open_epoch(self) -> None:
        self.epoch += 1
        self.formed = True
        members = sorted(self.live)
        self.outcome.epochs[self.epoch] = members
        self.joined, self.done, self.hearing = set(), set(), set()
        for worker in members:
            self.order(worker, order="epoch", number=self.epoch, members=members, orphaned=self.orphaned)

    def hear(self, worker: int) -> None:
        try:
            data = self.controls[worker].recv(1 << 16)
        except ConnectionResetError:
            return
        *lines, self.heard[worker] = (self.heard[worker] + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "result" in message:
                self.outcome.results.append(pickle.loads(bytes.fromhex(message["result"])))  # noqa: S301
            elif message.get("heard") == self.epoch:
                self.hearing.add(worker)
                self.tell_all_heard()
            elif message.get("asks") == self.epoch:
                self.revoke()
            elif "child" in message:
                self.children.append(message["child"])
            elif "holds" in message:
                (self.done if "done" in message else self.joined).add(worker)
                self.holds[worker] = message["holds"]
            elif message.get("fault") == "stop":
                os.waitid(os.P_PIDFD, self.handles[worker], os.WSTOPPED)
                self.lost(worker)

    def buried(self, worker: int) -> None:
        """Its process has ended."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.pids.pop(worker), 0)[1])
        if code == 0 and any(result.worker == worker for result in self.outcome.results):
            os.close(self.handles.pop(worker))
            return
        if code != -signal.SIGKILL:
            self.outcome.problems.append(f"worker {worker} ended with {code}:\n{self.log(worker)}")
        self.lost(worker)

    def lost(self, worker: int) -> None:
        self.outcome.ended.add(worker)
        self.live.discard(worker)
        self.formed = False
        if self.scenario.announce:
            self.revoke()
        self.tell_all_heard()

    def revoke(self) -> None:
        for survivor in sorted(self.live):
            self.order(survivor, order="revoke")

    def tell_all_heard(self) -> None:
        if self.hearing and self.live <= self.hearing:
            for survivor in sorted(self.live):
                self.order(survivor, order="all_heard")

    def proceed(self) -> None:
        """Open the next epoch, or end the scenario, when all that live are ready for it."""
        if not self.live:
            return
        if not self.formed and self.live <= self.joined | self.done:
            for worker in self.live & self.done:
                self.joined.add(worker)  # it waits with its group open; the next epoch's order makes it close it
            kept = {gradient for worker in self.live for gradient in self.holds[worker]}
            self.orphaned = sorted(set(range(self.scenario.workers)) - kept)
            self.open_epoch()
        elif self.formed and self.live == self.done:
            self.done = set()
            for worker in sorted(self.live):
                self.order(worker, order="finish")

    def give_up(self) -> None:
        for worker in sorted(self.live):
            os.kill(self.pids[worker], signal.SIGUSR1)
        time.sleep(0.5)  # for their stacks; the scenario has failed anyway
        where = f"epoch {self.epoch}, live {self.live}, joined {self.joined}, done {self.done}"
        self.outcome.problems += [f"not finished in time: {where}", *(f"{w}: {self.log(w)}" for w in sorted(self.live))]

    def log(self, worker: int) -> str:
        return Path(f"{self.folder}/{worker}.log").read_text()[-6000:]

    def clean_up(self) -> None:
        for pid in self.pids.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for pid in self.children:
            os.kill(pid, signal.SIGKILL)
        for handle in self.handles.values():
            os.close(handle)
        for control in self.controls.values():
            control.close()


def main() -> None:
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    gc.freeze()
    with contextlib.suppress(EOFError):  # nobody asks any more
        while True:
            scenario = pickle.load(sys.stdin.buffer)  # noqa: S301
            with tempfile.TemporaryDirectory() as folder:
                pickle.dump(Membership(scenario, folder).run(), answers)
                answers.flush()
