"""Measure how one coordinator process scales with the number N of workers, which one other process simulates.

    python benchmarks/bench_membership.py [--workers 1000 4000 16384] [--deaths 5] [--seconds 10] [--json PATH]

Measured for each N:

    the time until all workers have the first plan
    the processor time of the coordinator per second without deaths, with a heartbeat of each worker every second
    the time and the processor time of the coordinator to commit one iteration
    the time from a worker's death until the last survivor has the new plan, over several deaths, and the processor
    time of the coordinator per death
    the time from a hundred deaths at once until the last survivor has the new plan
    the time from the coordinator's death until the last survivor has a plan of the next candidate

The simulated workers have the statuses of Megatron's (TP 8 x PP 8, eight workers to a node).  They share one process
and one core, so the times include the work of all workers; only one of them reads the plans, which real workers do
in parallel.
"""

from __future__ import annotations

import os
import resource
import secrets
import selectors
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.megatron_runs import command_line, coordinator, write
from recover_megatron.instep.decision import JoinStatus
from recover_megatron.membership.messages.fields import NO_PLAN, NOTHING, Epoch, Message, PlanId, Presented, read_runs
from recover_megatron.membership.messages.plan_changes import pack, unpack
from recover_megatron.membership.messages.to_coordinator import (
    Ack,
    Attach,
    AttachNodeAgent,
    Beat,
    Done,
    Heard,
    Heartbeat,
    Join,
)
from recover_megatron.membership.messages.to_member import Commit, Plan, Revoke, ToMember
from recover_megatron.membership.records import Json, Runs, WorkerId, from_runs
from recover_megatron.membership.wire import MAX_TO_MEMBER, Secret
from recover_megatron.network import messages as wire
from recover_megatron.network.messages import Decoder

HEARTBEAT = 1.0
MANY = 100
SENT: wire.Schema[Message] = wire.Schema(wire.Challenge | wire.Proof | ToMember, MAX_TO_MEMBER, read_runs)
"""All messages of a coordinator."""


@lru_cache(100)
def parsed(body: bytes) -> Message:
    """Parse a message.  Equal messages are parsed only once, because real workers would parse in parallel."""
    return SENT.parse(body)


def status_of(worker: int) -> msgspec.Raw:
    """Return the status with which a worker of Megatron joins an epoch, as JSON."""
    node, replica = f"node-{worker // 8:05d}", worker // 64
    status = JoinStatus(
        replica, worker % 64, at=7, step=True, total=512, ran=(2 * replica, 2 * replica + 1), iteration=7,
        last_step=(7, 7), version=6, node=node, domains=(f"node {node}", f"domain rack{worker // 64}"),
        device=worker % 8, checkpoint="iteration 5 in /checkpoints", checkpoints=((5, "checkpoint"),),
        peer_store=f"10.1.{worker // 2048}.{worker // 8 % 256}:{30000 + worker % 8}",
        flags="0123456789abcdef", code="0123456789abcdef",
    )  # fmt: skip
    return msgspec.Raw(msgspec.json.encode(status.to_json()))


@dataclass
class Simulated:
    """Simulated worker, or the launcher of a node.  ``committed``: last iteration whose commit it has received."""

    number: int
    status: msgspec.Raw | None
    """None for a launcher."""
    sock: socket.socket = field(init=False)
    decoder: Decoder = field(init=False)
    holds: PlanId = NO_PLAN
    committed: int = 0
    attached: bool = False


class Crowd:
    """All simulated workers, and a launcher for each eight of them."""

    def __init__(self, workers: int, secret: Secret) -> None:
        self.secret = secret
        self.selector = selectors.DefaultSelector()
        self.workers = {number: Simulated(number, status_of(number)) for number in range(workers)}
        self.launchers = [Simulated(number, None) for number in range(0, workers, 8)]
        self._plan: Json = None  # the newest plan
        self._known = NOTHING  # presentation of the workers that have it
        self._beat_at = time.monotonic() + HEARTBEAT
        self._beats = 0
        self.newest = 0
        self.holding: Counter[tuple[str, int]] = Counter()  # ("plan", epoch) or ("commit", iteration) -> receivers

    def attach(self, port: int) -> None:
        """Connect all members to the candidate at ``port``, in place of the coordinator that they had."""
        members = [*self.launchers, *self.workers.values()]
        for worker in members:
            if worker.attached:
                self._close(worker)
                worker.attached = False
        for worker in members:
            worker.sock = socket.create_connection(("127.0.0.1", port), timeout=30)
            worker.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            worker.sock.setblocking(False)
            worker.decoder = Decoder()
            self.selector.register(worker.sock, selectors.EVENT_READ, worker)
            if worker.number % 50 == 49:
                self.serve(0.0)

    def serve(self, seconds: float) -> None:
        """Read the messages that arrive within ``seconds``, and send heartbeats if they are due."""
        for key, _ in self.selector.select(seconds):
            self._read(key.data)
        if time.monotonic() >= self._beat_at:
            self._beat_at += HEARTBEAT
            self._beats += 1
            self.send(Heartbeat(self._beats, 1, "compute", waiting=False, allow=0.0, number=self._beats))
            self.send(Beat(self._beats), self.launchers)

    def until(self, reached: Callable[[], bool], seconds: float = 300.0) -> float:
        """Call ``serve`` until ``reached()`` is true; return the seconds that this took."""
        start = time.monotonic()
        while not reached():
            if time.monotonic() - start > seconds:
                raise TimeoutError("the simulated workers did not reach the condition in time")
            self.serve(0.05)
        return time.monotonic() - start

    def all_hold(self, kind: str, number: int) -> bool:
        """Return whether all live workers have received message ``kind`` of epoch or iteration ``number``."""
        return self.holding[kind, number] == len(self.workers)

    def die(self, number: int) -> None:
        """Close the connection of a worker, as the kernel does when a worker dies."""
        self._close(self.workers.pop(number))

    def _close(self, worker: Simulated) -> None:
        self.selector.unregister(worker.sock)
        worker.sock.close()

    def send(self, message: Message, members: Iterable[Simulated] = ()) -> None:
        """Send a message from the attached ``members``; default: all workers."""
        frame = wire.encode(message)
        for worker in members or self.workers.values():
            if worker.attached:
                worker.sock.send(frame)

    def _read(self, worker: Simulated) -> None:
        data = worker.sock.recv(1 << 16)
        if not data:
            raise ConnectionError(f"the coordinator closed the session of worker {worker.number}")
        worker.decoder.feed(data)
        while (body := worker.decoder.next(MAX_TO_MEMBER)) is not None:
            match message := parsed(body):
                case wire.Challenge():
                    worker.sock.send(wire.encode(self.secret.answer(message)[0]))
                case wire.Proof():
                    worker.attached = True
                    node, incarnation = f"node-{worker.number // 8:05d}", f"{worker.number:032x}"
                    process = WorkerId(worker.number), incarnation, node, 1, self._known
                    attach = Attach(*process, done=worker.committed, node_agent=node)
                    running = Runs([[worker.number, worker.number + 7]])
                    launcher = AttachNodeAgent(node, incarnation, self._known, running)
                    worker.sock.send(wire.encode(attach if worker.status else launcher))
                case Revoke() if worker.status is None:
                    worker.sock.send(wire.encode(Ack(message.epoch, message.term)))
                case Revoke():
                    worker.sock.send(wire.encode(Heard(message.epoch, message.term)))
                    asked = message.present_plan == worker.number
                    plan = pack(self._plan, from_runs(self._known.formed.members)) if asked else None
                    join = Join(message.epoch, worker.status, worker.committed, holds=worker.holds, plan=plan)
                    worker.sock.send(wire.encode(join))
                case Plan() if worker.status is not None:
                    worker.holds = message.epoch, message.term
                    if self.newest < message.epoch:
                        formed = Epoch(message.epoch, message.term, message.members)
                        self._known = Presented(message.term, formed, message.committed, Runs(), Runs())
                        base = self._plan if message.base != NO_PLAN else None
                        self._plan = unpack(message.data, from_runs(message.members), base)
                    self.holding["plan", message.epoch] += 1
                    self.newest = max(self.newest, message.epoch)
                case Commit():
                    worker.committed = message.iteration
                    self.holding["commit", worker.committed] += 1


def processor_seconds(process: psutil.Process) -> float:
    """Return the seconds of user and system time that a process has used."""
    times = process.cpu_times()
    return float(times.user + times.system)


def measure(workers: int, deaths: int, seconds: float) -> dict[str, float]:
    """Measure a coordinator with ``workers`` workers."""
    secret = secrets.token_hex(16)
    with (
        tempfile.TemporaryDirectory() as folder,
        coordinator(workers, Path(folder) / "events.jsonl", secret, "--heartbeat-timeout", "60") as (started, port),
    ):
        process = psutil.Process(started.pid)
        start = time.monotonic()
        crowd = Crowd(workers, Secret(secret.encode()))
        crowd.attach(port)
        crowd.until(lambda: crowd.all_hold("plan", crowd.newest))
        formed = time.monotonic() - start

        before, at = processor_seconds(process), time.monotonic()
        crowd.until(lambda: time.monotonic() - at >= seconds)
        steady = (processor_seconds(process) - before) / (time.monotonic() - at)

        epoch, rounds = crowd.newest, 5
        before = processor_seconds(process)
        agreed = []
        for iteration in range(1, rounds + 1):
            crowd.send(Done(epoch, iteration))
            agreed.append(crowd.until(lambda t=iteration: crowd.all_hold("commit", t)))
        agree_cpu = (processor_seconds(process) - before) / rounds

        recovered, before = [], processor_seconds(process)
        for victim in range(deaths):
            at = time.monotonic()
            crowd.die(victim)
            old = crowd.newest
            crowd.until(lambda e=old: crowd.newest > e and crowd.all_hold("plan", crowd.newest))
            recovered.append(time.monotonic() - at)
        death_cpu = (processor_seconds(process) - before) / deaths
        at, old = time.monotonic(), crowd.newest
        for victim in range(deaths, deaths + MANY):
            crowd.die(victim)
        crowd.until(lambda: crowd.newest > old and crowd.all_hold("plan", crowd.newest))
        together = time.monotonic() - at
        memory = process.memory_info().rss
        with coordinator(workers, Path(folder) / "next.jsonl", secret, "--heartbeat-timeout", "60") as (_, next_port):
            at, old = time.monotonic(), crowd.newest
            process.kill()
            crowd.attach(next_port)
            crowd.until(lambda: crowd.newest > old and crowd.all_hold("plan", crowd.newest))
            failover = time.monotonic() - at
        return {
            "workers": workers,
            "first_plan_s": round(formed, 3),
            "steady_cpu_share": round(steady, 4),
            "agree_ms": round(statistics.median(agreed) * 1e3, 1),
            "agree_cpu_ms": round(agree_cpu * 1e3, 1),
            "death_to_last_plan_median_ms": round(statistics.median(recovered) * 1e3, 1),
            "death_to_last_plan_worst_ms": round(max(recovered) * 1e3, 1),
            "death_cpu_ms": round(death_cpu * 1e3, 1),
            "hundred_deaths_ms": round(together * 1e3, 1),
            "failover_s": round(failover, 2),
            "coordinator_mib": round(memory / 2**20, 1),
        }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[1000, 4000, 16384])
    parser.add_argument("--deaths", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0, help="duration of the measurement without deaths")
    args = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    results: list[dict[str, Any]] = []
    for workers in args.workers:
        result = measure(workers, args.deaths, args.seconds)
        if not results:
            print(" | ".join(result))
        results.append(result)
        print(" | ".join(str(value) for value in result.values()), flush=True)
    write(args, {"cores": os.cpu_count(), "results": results})


if __name__ == "__main__":
    main()
