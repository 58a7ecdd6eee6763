"""Measure how one coordinator process scales with the number N of workers, which one other process simulates.

    python benchmarks/bench_membership.py [--workers 1000 4000 16384] [--deaths 5] [--seconds 10] [--json PATH]
                                          [--relays without with]

Measured for each N, without and with relays (``membership/io/relay.py``), one after the other:

    the time until all workers have the first plan
    the processor time of the coordinator per second without deaths, with a heartbeat of each worker every second
    the time and the processor time of the coordinator to commit one iteration
    the time from a worker's death until the last survivor has the new plan, over several deaths, and the processor
    time of the coordinator per death
    the time from a hundred deaths at once until the last survivor has the new plan
    the time from the coordinator's death until the last survivor has a plan of the next candidate

The simulated workers have the statuses of Megatron's (TP 8 x PP 8, eight workers to a node).  They share one process
and one core, so the times include the work of all workers; only one of them reads the plans, which real workers do
in parallel.  With relays, the process sends and receives what the relay of each node would.
"""

from __future__ import annotations

import itertools
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
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import msgspec
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.megatron_runs import command_line, coordinator, write
from recover_megatron.instep.decision import JoinStatus
from recover_megatron.membership.messages.fields import NO_PLAN, NOTHING, Epoch, Message, PlanId, Presented, read_runs
from recover_megatron.membership.messages.plan_changes import pack, unpack
from recover_megatron.membership.messages.relayed import Beats, Closed, From, Opened, Relay, To, ToRelay
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
SENT: wire.Schema[Message] = wire.Schema(wire.Challenge | wire.Proof | ToMember | ToRelay, MAX_TO_MEMBER, read_runs)
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


class Line:
    """TCP connection: of one worker or launcher, or, with ``relay``, of a node's relay; ``members``: by channel."""

    def __init__(self, port: int, members: dict[int, Simulated], relay: bool) -> None:
        self.members = members
        self.relay = relay
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=30)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock.setblocking(False)
        self.decoder = Decoder()
        self.to: list[int] | None = None
        """Channels of a relay that get the next frame."""
        self._out = bytearray()
        for member in members.values():
            member.line = self

    def put(self, message: Message) -> None:
        """Queue a message of the relay, or of the only member, until ``flush``."""
        self._out += wire.encode(message)

    def put_from(self, channel: int, message: Message) -> None:
        """Queue a message of one member."""
        if self.relay:
            self.put(From(channel))
        self.put(message)

    def flush(self) -> None:
        if self._out:
            self.sock.sendall(self._out)
            self._out.clear()


@dataclass
class Simulated:
    """Simulated worker, or the launcher of a node.  ``committed``: last iteration whose commit it has received."""

    number: int
    status: msgspec.Raw | None
    """None for a launcher."""
    line: Line = field(init=False)
    holds: PlanId = NO_PLAN
    committed: int = 0
    attached: bool = False


class Crowd:
    """All simulated workers, and a launcher for each eight of them; with ``relays``, a relay, too."""

    def __init__(self, workers: int, secret: Secret, relays: bool) -> None:
        self.secret = secret
        self.relays = relays
        self.selector = selectors.DefaultSelector()
        self.workers = {number: Simulated(number, status_of(number)) for number in range(workers)}
        self.launchers = [Simulated(number, None) for number in range(0, workers, 8)]
        self._plan: Json = None  # the newest plan
        self._known = NOTHING  # presentation of the workers that have it
        self._beat_at = time.monotonic() + HEARTBEAT
        self._beats = 0
        self.lines: list[Line] = []
        self.newest = 0
        self.holding: Counter[tuple[str, int]] = Counter()  # ("plan", epoch) or ("commit", iteration) -> receivers

    def attach(self, port: int) -> None:
        """Connect all members to the candidate at ``port``, in place of the coordinator that they had."""
        self.close()
        together = [{launcher.number: launcher} for launcher in self.launchers]
        nodes: dict[int, dict[int, Simulated]] = {}
        for worker in self.workers.values():
            nodes.setdefault(worker.number // 8 if self.relays else worker.number, {})[worker.number] = worker
        for number, members in enumerate([*together, *nodes.values()]):
            for member in members.values():
                member.attached = False
            line = Line(port, members, self.relays and number >= len(together))
            self.selector.register(line.sock, selectors.EVENT_READ, line)
            self.lines.append(line)
            if number % 50 == 49:
                self.serve(0.0)

    def close(self) -> None:
        for line in self.lines:
            self._close(line)
        self.lines = []

    def serve(self, seconds: float) -> None:
        """Read the messages that arrive within ``seconds``, and send heartbeats if they are due."""
        for key, _ in self.selector.select(seconds):
            self._read(key.data)
        if time.monotonic() >= self._beat_at:
            self._beat_at += HEARTBEAT
            self._beats += 1
            beat, of_launcher = Heartbeat(self._beats, 1, "compute", False, 0.0, number=self._beats), Beat(self._beats)
            for line in self.lines:
                attached = [(channel, member) for channel, member in line.members.items() if member.attached]
                if line.relay and attached:
                    line.put(Beats([(channel, beat) for channel, _ in attached]))
                elif attached:
                    line.put(beat if attached[0][1].status else of_launcher)
                line.flush()

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
        line = self.workers.pop(number).line
        del line.members[number]
        if line.relay:
            line.put(Closed(number, ended=True, reason="its connection was closed"))
            line.flush()
        else:
            self._close(line)
            self.lines.remove(line)

    def _close(self, line: Line) -> None:
        self.selector.unregister(line.sock)
        line.sock.close()

    def send(self, message: Message) -> None:
        """Send a message from all attached workers."""
        for line in self.lines:
            for channel, member in line.members.items():
                if member.attached and member.status:
                    line.put_from(channel, message)
            line.flush()

    def _read(self, line: Line) -> None:
        data = line.sock.recv(1 << 18)
        if not data:
            raise ConnectionError(f"the coordinator closed the connection of {sorted(line.members)}")
        line.decoder.feed(data)
        while (body := line.decoder.next(MAX_TO_MEMBER)) is not None:
            message = parsed(body)
            if not line.relay:
                for channel, member in line.members.items():
                    self._receive(channel, member, message)
            elif line.to is not None:
                for channel in line.to:
                    if channel in line.members:
                        self._receive(channel, line.members[channel], message)
                line.to = None
            elif isinstance(message, To):
                line.to = message.channels
            elif isinstance(message, wire.Challenge):
                line.put(self.secret.answer(message)[0])
            elif isinstance(message, wire.Proof):
                line.put(Relay())
                for channel in line.members:
                    line.put(Opened(channel))
        line.flush()

    def _receive(self, channel: int, worker: Simulated, message: Message) -> None:
        """Process a message to a worker or a launcher."""
        answer = partial(worker.line.put_from, channel)
        match message:
            case wire.Challenge():
                answer(self.secret.answer(message)[0])
            case wire.Proof():
                worker.attached = True
                node, incarnation = f"node-{worker.number // 8:05d}", f"{worker.number:032x}"
                process = WorkerId(worker.number), incarnation, node, 1, self._known
                attach = Attach(*process, done=worker.committed, node_agent=node)
                running = Runs([[worker.number, worker.number + 7]])
                answer(attach if worker.status else AttachNodeAgent(node, incarnation, self._known, running))
            case Revoke() if worker.status is None:
                answer(Ack(message.epoch, message.term))
            case Revoke():
                answer(Heard(message.epoch, message.term))
                asked = message.present_plan == worker.number
                plan = pack(self._plan, from_runs(self._known.formed.members)) if asked else None
                answer(Join(message.epoch, worker.status, worker.committed, holds=worker.holds, plan=plan))
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


def measure(workers: int, relays: bool, deaths: int, seconds: float) -> dict[str, float]:
    """Measure a coordinator with ``workers`` workers."""
    secret = secrets.token_hex(16)
    with (
        tempfile.TemporaryDirectory() as folder,
        coordinator(workers, Path(folder) / "events.jsonl", secret, "--heartbeat-timeout", "60") as (started, port),
    ):
        process = psutil.Process(started.pid)
        start = time.monotonic()
        crowd = Crowd(workers, Secret(secret.encode()), relays)
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
        crowd.close()
        return {
            "workers": workers,
            "relays": int(relays),
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
    parser.add_argument("--relays", choices=("without", "with"), nargs="+", default=["without", "with"])
    parser.add_argument("--deaths", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0, help="duration of the measurement without deaths")
    args = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    results: list[dict[str, Any]] = []
    for workers, relays in itertools.product(args.workers, args.relays):
        result = measure(workers, relays == "with", args.deaths, args.seconds)
        if not results:
            print(" | ".join(result))
        results.append(result)
        print(" | ".join(str(value) for value in result.values()), flush=True)
    write(args, {"cores": os.cpu_count(), "results": results})


if __name__ == "__main__":
    main()
