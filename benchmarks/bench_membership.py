"""Measure how one coordinator process scales with the number N of workers, which one other process simulates.

    python benchmarks/bench_membership.py [--workers 1000 4000 16384] [--deaths 5] [--seconds 10] [--json PATH]

Measured for each N:

    the time until all workers have the first plan
    the processor time of the coordinator per second without deaths, with a heartbeat of each worker every second
    the time and the processor time of the coordinator to commit one iteration
    the time from a worker's death until the last survivor has the new plan, over several deaths

    the time from a hundred deaths at once until the last survivor has the new plan

The simulated workers have the statuses of Megatron's (TP 8 x PP 8, eight workers to a node).  They share one process
and one core, so the times include the work of all workers; they do not parse the plans, which real workers do in
parallel.
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
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.megatron_runs import command_line, coordinator, write
from recover_megatron.instep.decision import JoinStatus
from recover_megatron.membership import wire
from recover_megatron.membership.messages.fields import NO_PLAN, NOTHING, Message, PlanId
from recover_megatron.membership.messages.to_coordinator import Attach, Done, Heartbeat, Join
from recover_megatron.membership.messages.to_member import Commit, Plan, Revoke, ToMember
from recover_megatron.membership.records import WorkerId
from recover_megatron.membership.wire import Secret
from recover_megatron.network.connection import Decoder

HEARTBEAT = 1.0
MANY = 100
SENT: wire.Stage[Message] = wire.Stage(wire.Challenge | wire.Proof | ToMember, wire.MAX_TO_MEMBER)
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
    """Simulated worker.  ``committed``: last iteration whose commit it has received."""

    number: int
    sock: socket.socket
    decoder: Decoder
    status: msgspec.Raw
    holds: PlanId = NO_PLAN
    committed: int = 0
    attached: bool = False


class Crowd:
    """All simulated workers."""

    def __init__(self, address: tuple[str, int], workers: int, secret: Secret) -> None:
        self.secret = secret
        self.selector = selectors.DefaultSelector()
        self.workers: dict[int, Simulated] = {}
        self._address = address
        self._beat_at = time.monotonic() + HEARTBEAT
        self._beats = 0
        self.newest = 0
        self.holding: Counter[tuple[str, int]] = Counter()  # ("plan", epoch) or ("commit", iteration) -> receivers
        for number in range(workers):
            sock = socket.create_connection(address, timeout=30)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setblocking(False)
            worker = Simulated(number, sock, Decoder(wire.MAX_TO_MEMBER), status_of(number))
            self.workers[number] = worker
            self.selector.register(sock, selectors.EVENT_READ, worker)
            if number % 50 == 49:
                self.serve(0.0)

    def serve(self, seconds: float) -> None:
        """Read the messages that arrive within ``seconds``, and send heartbeats if they are due."""
        for key, _ in self.selector.select(seconds):
            self._read(key.data)
        if time.monotonic() >= self._beat_at:
            self._beat_at += HEARTBEAT
            self._beats += 1
            self.send(Heartbeat(self._beats, 1, "compute", waiting=False, allow=0.0))

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
        worker = self.workers.pop(number)
        self.selector.unregister(worker.sock)
        worker.sock.close()

    def send(self, message: Message) -> None:
        """Send a message from all attached workers."""
        frame = wire.encode(message)
        for worker in self.workers.values():
            if worker.attached:
                worker.sock.send(frame)

    def _read(self, worker: Simulated) -> None:
        data = worker.sock.recv(1 << 16)
        if not data:
            raise ConnectionError(f"the coordinator closed the session of worker {worker.number}")
        worker.decoder.feed(data)
        while (body := worker.decoder.next()) is not None:
            match message := parsed(body):
                case wire.Challenge():
                    worker.sock.send(wire.encode(self.secret.answer(message)[0]))
                case wire.Proof():
                    worker.attached = True
                    attach = Attach(WorkerId(worker.number), f"{worker.number:032x}", "simulated", 1, NOTHING, done=0)
                    worker.sock.send(wire.encode(attach))
                case Revoke():
                    join = Join(message.epoch, worker.status, worker.committed, holds=worker.holds)
                    worker.sock.send(wire.encode(join))
                case Plan():
                    worker.holds = message.epoch, message.term
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
        crowd = Crowd(("127.0.0.1", port), workers, Secret(secret.encode()))
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

        recovered = []
        for victim in range(deaths):
            at = time.monotonic()
            crowd.die(victim)
            old = crowd.newest
            crowd.until(lambda e=old: crowd.newest > e and crowd.all_hold("plan", crowd.newest))
            recovered.append(time.monotonic() - at)
        at, old = time.monotonic(), crowd.newest
        for victim in range(deaths, deaths + MANY):
            crowd.die(victim)
        crowd.until(lambda: crowd.newest > old and crowd.all_hold("plan", crowd.newest))
        together = time.monotonic() - at
        return {
            "workers": workers,
            "first_plan_s": round(formed, 3),
            "steady_cpu_share": round(steady, 4),
            "agree_ms": round(statistics.median(agreed) * 1e3, 1),
            "agree_cpu_ms": round(agree_cpu * 1e3, 1),
            "death_to_last_plan_median_ms": round(statistics.median(recovered) * 1e3, 1),
            "death_to_last_plan_worst_ms": round(max(recovered) * 1e3, 1),
            "hundred_deaths_ms": round(together * 1e3, 1),
            "coordinator_mib": round(process.memory_info().rss / 2**20, 1),
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
