"""Workers behind a relay: the run is the same, and neither a lost relay nor a bad message costs another worker."""

from __future__ import annotations

import errno
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from cluster import Cluster, cluster
from test_road import PATIENT, SECRET, Quiet

from recover_megatron.membership import Session
from recover_megatron.membership.coordinator import Coordinator
from recover_megatron.membership.io import relay as program
from recover_megatron.membership.io.observer import leave_directly
from recover_megatron.membership.io.server import CoordinatorServer
from recover_megatron.membership.messages import relayed
from recover_megatron.membership.messages.fields import NOTHING, Presented
from recover_megatron.membership.messages.to_coordinator import Attach, Bye, Done, Heartbeat
from recover_megatron.membership.records import CoordinatorLost, Presentation, Settings, WorkerId
from recover_megatron.membership.sides.follower import Stage
from recover_megatron.membership.sides.node_agent import NodeAgent
from recover_megatron.membership.wire import FROM_RELAY, MAX_TO_COORDINATOR, TO_RELAY, Secret
from recover_megatron.network import messages as wire
from tests.harness.waiting import DEADLINE, eventually

BEAT = Heartbeat(1, 1, "compute", waiting=False, allow=0.0, number=3)


def a_name() -> str:
    return f"recover-test-{secrets.token_hex(8)}"


@contextmanager
def relay_of(run: Cluster) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The name and the process of a relay."""
    with program.listen(name := a_name()) as listener:
        argv = [sys.executable, "-m", "recover_megatron.membership.io.relay", "--listen-fd", str(listener.fileno())]
        environ = {**os.environ, "RECOVER_SECRET_FILE": str(run.secret_file)}
        process = subprocess.Popen(argv, env=environ, pass_fds=[listener.fileno()])
    try:
        yield name, process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    "loss",
    ["relay", *(pytest.param(each, marks=pytest.mark.slow) for each in ("worker", "stopped relay", "coordinator"))],
)
def test_the_run_continues_whatever_is_lost(tmp_path: Path, loss: str) -> None:
    with cluster(tmp_path) as run, relay_of(run) as (name, process):
        run.start(3, candidates=2, launcher=True, relay=name)
        run.all_commit()
        starts = {number: worker.says() for number, worker in run.workers.items()}
        match loss:
            case "worker":
                run.workers.pop(2).kill()
            case "relay":  # and a worker that connects directly only later
                run.workers[0].kill(signal.SIGSTOP)
                process.kill()
                run.workers[1].event("pushed", start=starts[1])
                run.workers[0].kill(signal.SIGCONT)
            case "stopped relay":
                process.send_signal(signal.SIGSTOP)
            case "coordinator":
                run.coordinators[0].kill()
        for number, worker in run.workers.items():
            plan = worker.event("plan", start=starts[number])
            assert plan["members"] == ([0, 1] if loss == "worker" else [0, 1, 2])
            worker.event("commit", start=worker.says())
        process.send_signal(signal.SIGCONT)
        for worker in run.workers.values():
            worker.event("commit", start=worker.says())
        if loss == "relay":
            eventually(lambda: run.logged("relay_lost"), "the lost relay is logged")
        assert len(run.logged("relay_lost")) == (loss == "relay")
        # Workers that connect again one by one may end several epochs.
        assert len(run.logged("plan")) == (1 if loss == "coordinator" else 2) or "relay" in loss


def test_a_node_whose_processes_are_all_killed_is_known_to_be_dead_at_once(tmp_path: Path) -> None:
    """The relay ends first: its connection ends with the last worker that has a copy of it."""
    with cluster(tmp_path) as run, relay_of(run) as (one, _), relay_of(run) as (other, process):
        run.start(3, its={2: {"relay": other}}, relay=one)
        run.all_commit()
        starts = {number: worker.says() for number, worker in run.workers.items()}
        victim = run.workers.pop(2)
        victim.kill(signal.SIGSTOP)  # it cannot connect directly
        process.kill()
        process.wait()
        victim.kill()
        for number, worker in run.workers.items():
            assert worker.event("plan", start=starts[number])["members"] == [0, 1]
        eventually(lambda: run.logged("fault"), "the death is logged")
        assert [(event["worker"], event["kind"]) for event in run.logged("fault")] == [(2, "dead")]


class Run:
    """A coordinator and a relay as threads of this process."""

    def __init__(self, world: int, settings: Settings = PATIENT) -> None:
        self.codes = list[int]()
        self.records: list[Mapping[str, Any]] = []
        listener, self.name = socket.create_server(("127.0.0.1", 0)), a_name()
        self.address = listener.getsockname()[:2]
        core = Coordinator(world, settings, salt=1, now=time.monotonic())
        self.server = CoordinatorServer(core, listener, SECRET, self.records.append)
        self.relay = program.Relay(program.listen(self.name), SECRET)
        self.serving = threading.Thread(target=lambda: self.codes.append(self.server.serve_forever()), daemon=True)
        self.serving.start()
        threading.Thread(target=self.relay.serve_forever, daemon=True).start()

    def session(self, worker: int, settings: Settings = PATIENT) -> Session:
        return Session.connect([self.address], worker, SECRET, settings, node_agent="n", relay=self.name)

    def in_relay(self, call: Any, *arguments: object) -> None:
        """Run a function in the relay's thread, and wait until it has returned."""
        done = threading.Event()
        self.relay._loop.call_from_thread(lambda: (call(*arguments), done.set()))
        assert done.wait(DEADLINE)

    def of(self, *kinds: str) -> list[str]:
        """The logged events of these kinds."""
        return [str(record["event"]) for record in self.records if record["event"] in kinds]

    def rejected(self) -> list[str]:
        return [str(record["reason"]) for record in self.records if record["event"] == "rejected"]


def join_all(sessions: list[Session]) -> None:
    threads = [threading.Thread(target=session.join, args=({},)) for session in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_a_relay_passes_on_what_a_worker_has_sent_before_its_launchers_report_that_it_has_ended() -> None:
    run = Run(2)
    agent = NodeAgent([run.address], "n", SECRET, Quiet(), PATIENT)
    sessions = [run.session(number) for number in range(2)]
    join_all(sessions)
    for worker in run.relay._workers.values():  # from now on, the relay reads only what it is told to read
        run.in_relay(run.relay._loop.remove_reader, worker.line.descriptor)
    sessions[1].give_up(7, "it cannot be")
    agent.ended(1, "exit code 7")
    eventually(lambda: run.codes or run.of("fault"), "one of both counts")
    assert run.codes == [7]
    with pytest.raises(CoordinatorLost, match="it cannot be"):
        sessions[0].join({})
    for client in (*sessions, agent):
        client._client.close()
    run.server.close()


class Raw:
    """A connection behind a relay, or a relay's own, that sends what a test wants."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(DEADLINE)
        self.sock = sock
        self.decoder = wire.Decoder()

    def send(self, *frames: bytes | wire.Message) -> None:
        self.sock.sendall(b"".join(f if isinstance(f, bytes) else wire.encode(f) for f in frames))

    def body(self) -> bytes | None:
        """The next frame; None: the other side has closed the connection."""
        while (body := self.decoder.next(wire.LONGEST)) is None:
            try:
                data = self.sock.recv(1 << 16)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self.decoder.feed(data)
        return body

    def until(self, kind: bytes) -> bytes:
        while (body := self.body()) is not None and b'"type":"' + kind not in body:
            pass
        assert body is not None, f"no {kind.decode()}"
        return body

    def is_closed(self) -> bool:
        while self.body() is not None:
            pass
        return True

    def prove(self) -> None:
        auth, _ = SECRET.answer(wire.CHALLENGE.parse(self.until(b"challenge")))
        self.send(auth)
        self.until(b"proof")


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


def behind(run: Run) -> Raw:
    """A connection to the coordinator through the relay, before the proof of the secret."""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect("\0" + run.name)
    raw = Raw(sock)
    raw.send(relayed.Dial(run.address))
    return raw


def test_a_malformed_message_behind_a_relay_costs_only_the_connection_that_carried_it() -> None:
    run = Run(1)
    session = run.session(0)
    join_all([session])
    for frame in (framed(b"{"), framed(b'{"type":"done"}'), framed(b'{"type":"heartbeat","count":-1}'),
                  wire.encode(relayed.Relay()), (MAX_TO_COORDINATOR + 1).to_bytes(4, "big")):  # fmt: skip
        raw = behind(run)
        raw.prove()
        raw.send(frame)
        assert raw.is_closed()
    stranger = behind(run)
    stranger.send(framed(b'{"type":"auth","nonce":"' + b"0" * wire.MAX_HANDSHAKE + b'"}'))
    assert stranger.is_closed()
    for before in (framed(b'{"type":"beat"}'), wire.encode(relayed.Dial(("a" * 64, 1)))):
        raw = Raw(socket.socket(socket.AF_UNIX))
        raw.sock.connect("\0" + run.name)
        raw.send(before)
        assert raw.is_closed()
    session.agree(1)  # the worker beside them notices nothing
    # All but the frame that is too long, the missing dial and the name that is too long: the relay sees these.
    assert len(run.rejected()) == 5
    assert any("before the proof" in reason for reason in run.rejected())
    assert any("must not be a relay" in reason for reason in run.rejected())
    assert not run.of("fault", "relay_lost")
    session._client.close()


@pytest.mark.parametrize(
    "frames",
    [[framed(b'{"type":"to","channels":[1]}')], [relayed.Opened(1), relayed.Opened(1)], [framed(b"x")]],
    ids=["another's message", "a channel twice", "garbage"],
)
def test_a_relay_that_sends_a_malformed_message_loses_its_connection(frames: list[Any]) -> None:
    run = Run(1)
    session = run.session(0)
    join_all([session])
    raw = Raw(socket.create_connection(run.address))
    raw.prove()
    raw.send(relayed.Relay(), *frames)
    assert raw.is_closed()
    session.agree(1)
    assert run.of("fault", "relay_lost") == ["relay_lost"]
    assert len(run.server._connections) == 2  # of the other relay and its worker
    session._client.close()


def test_heartbeats_of_a_node_are_answered_together_and_unknown_channels_do_no_harm() -> None:
    run = Run(1)
    raw = Raw(socket.create_connection(run.address))
    raw.prove()
    raw.send(relayed.Relay())
    for channel in (6, 5):
        raw.send(relayed.Opened(channel))
        raw.until(b"to")
        challenge = wire.CHALLENGE.parse(raw.body() or b"")
        raw.send(relayed.From(9), framed(b"not looked at"), relayed.From(channel), SECRET.answer(challenge)[0])
        raw.until(b"proof")
    attach = Attach(WorkerId(0), "0f" * 16, "host", 1, NOTHING, done=0)
    # Channel 9 is unknown. Channel 6 has not attached, so it is refused, once.
    raw.send(relayed.From(5), attach, relayed.Beats([(9, BEAT), (6, BEAT), (6, BEAT), (5, BEAT)]))
    assert TO_RELAY.parse(raw.until(b"answers")) == relayed.Answers([(5, 3)])
    raw.send(relayed.Closed(9, ended=True, reason="gone"), relayed.WasRead(9), relayed.Read(9))
    assert raw.is_closed()  # ``Read`` is no message of a relay
    eventually(lambda: run.of("fault", "refused", "relay_lost") == ["refused", "relay_lost"], "it is logged")


def test_a_relay_keeps_the_order_of_a_workers_messages() -> None:
    candidate, name = socket.create_server(("127.0.0.1", 0)), a_name()
    relay = program.Relay(program.listen(name), SECRET)
    threading.Thread(target=relay.serve_forever, daemon=True).start()
    worker = Raw(socket.socket(socket.AF_UNIX))
    worker.sock.connect("\0" + name)
    done = Done(1, 1)
    worker.send(relayed.Dial(candidate.getsockname()[:2]))
    relays = Raw(candidate.accept()[0])
    challenge = wire.Challenge(wire.PROTOCOL_VERSION, "0f" * 32)
    relays.send(challenge)
    proof = SECRET.accept(challenge.nonce, wire.AUTH.parse(relays.body() or b""))
    assert proof is not None
    relays.send(proof)
    opened = FROM_RELAY.parse(relays.until(b"opened"))
    assert isinstance(opened, relayed.Opened)
    worker.send(BEAT, done, BEAT, BEAT, done)
    received = list[bytes]()
    while received.count(wire.encode(done)[4:]) < 2:
        received.append(relays.body() or b"")
    channel = opened.channel
    once, twice = relayed.Beats([(channel, BEAT)]), relayed.Beats([(channel, BEAT)] * 2)
    later = [relayed.From(channel), done]
    assert received == [wire.encode(message)[4:] for message in [once, *later, twice, *later]]


def test_heartbeats_that_a_relay_cannot_send_yet_are_few_and_none_comes_before_the_proof() -> None:
    candidate, name = socket.create_server(("127.0.0.1", 0)), a_name()
    relay = program.Relay(program.listen(name), SECRET)
    threading.Thread(target=relay.serve_forever, daemon=True).start()
    early, worker = (Raw(socket.socket(socket.AF_UNIX)) for _ in range(2))
    for raw in (early, worker):
        raw.sock.connect("\0" + name)
        raw.send(relayed.Dial(candidate.getsockname()[:2]))
        raw.until(b'relaying","reached":true')  # a candidate whose only worker is lost is forgotten
    relays = Raw(candidate.accept()[0])
    early.send(BEAT)
    assert early.is_closed()
    relays.send(challenge := wire.Challenge(wire.PROTOCOL_VERSION, "0f" * 32))
    proof = SECRET.accept(challenge.nonce, wire.AUTH.parse(relays.body() or b""))
    assert proof is not None
    relays.send(proof)
    relays.until(b"opened")
    worker.send(*[BEAT] * (relayed.MOST_CHANNELS + 1000))
    counts = list[int]()
    while sum(counts) < relayed.MOST_CHANNELS + 1000:
        beats = FROM_RELAY.parse(relays.until(b"beats"))
        assert isinstance(beats, relayed.Beats)
        counts.append(len(beats.beats))
    assert sum(counts) == relayed.MOST_CHANNELS + 1000


@pytest.mark.parametrize("fails", ["is stopped", "ends before it has read it"])
def test_a_worker_that_has_finished_is_not_lost_with_its_bye_if_the_relay(fails: str) -> None:
    times = {"hang_timeout": 10.0, "stall_timeout": 10.0, "start_timeout": 3000.0}
    settings = Settings(heartbeat_interval=0.5, heartbeat_timeout=2.0, **times)
    run = Run(2, settings)
    sessions = [run.session(number, settings) for number in range(2)]
    join_all(sessions)
    loop, over = run.relay._loop, threading.Event()
    if fails == "is stopped":
        loop.call_from_thread(over.wait)
    else:
        for worker in run.relay._workers.values():
            run.in_relay(loop.remove_reader, worker.line.descriptor)
    leaving = [threading.Thread(target=session.leave) for session in sessions]
    for thread in leaving:
        thread.start()
    if fails != "is stopped":
        for session, worker in zip(sessions, list(run.relay._workers.values()), strict=True):
            eventually(lambda s=session: s._core.leaving, "it leaves")
            run.in_relay(worker.line.close)
    for thread in leaving:
        thread.join(DEADLINE)
    eventually(lambda: run.codes or run.of("fault"), "the run is over, or they count as lost")
    over.set()
    assert run.codes == [0]
    assert run.of("left", "fault") == ["left", "left"]


@pytest.mark.parametrize("relay", ["works", "is stopped"])
def test_a_worker_that_leaves_does_not_wait_for_the_others(relay: str) -> None:
    """Its launcher vouches for it, so the coordinator would talk to it for ever."""
    settings = Settings(heartbeat_interval=0.5, heartbeat_timeout=2.0, hang_timeout=3000.0, start_timeout=3000.0)
    run, over = Run(2, settings), threading.Event()
    agent = NodeAgent([run.address], "n", SECRET, Quiet(), settings)
    sessions = [run.session(number, settings) for number in range(2)]
    join_all(sessions)
    if relay == "is stopped":
        run.relay._loop.call_from_thread(over.wait)
    leaving = threading.Thread(target=sessions[1].leave_idle)
    leaving.start()
    leaving.join(DEADLINE)
    assert not leaving.is_alive()
    assert not sessions[1]._client._says_goodbye  # it has an answer, and did not only wait long enough
    assert run.of("left", "fault") == ["left"]
    over.set()
    for client in (sessions[0], agent):
        client._client.close()


def test_a_member_is_no_relay_and_a_relay_whose_proof_is_refused_leaves_its_workers_to_themselves() -> None:
    run = Run(1)
    raw = Raw(socket.create_connection(run.address))
    raw.prove()
    raw.send(Attach(WorkerId(0), "0f" * 16, "host", 1, NOTHING, done=0), relayed.Relay())
    assert raw.is_closed()
    assert any("must not be a relay" in reason for reason in run.rejected())
    other = program.Relay(program.listen(name := a_name()), Secret(b"another secret, long enough"))
    threading.Thread(target=other.serve_forever, daemon=True).start()
    session = Session.connect([run.address], 0, SECRET, Settings(), relay=name)
    eventually(lambda: session._core.stage is not Stage.SEEKING, "it has connected directly")
    assert not session._core.in_step
    session._client.close()


def test_a_worker_that_starts_while_its_relay_is_stopped_connects_directly() -> None:
    """Its attempts, each shorter than the time in which it gives the relay up, count together."""
    settings = Settings(heartbeat_interval=0.1, heartbeat_timeout=1.0, hang_timeout=3000.0, start_timeout=3000.0)
    run, name = Run(1, settings), a_name()
    with program.listen(name):  # the kernel accepts the connections, and nobody answers
        other = socket.create_server(("127.0.0.1", 0)).getsockname()[:2]  # a candidate that is stopped, too
        session = Session.connect([other, run.address], 0, SECRET, settings, relay=name)
        join_all([session])
        session.agree(1)
        session._client.close()


def test_a_process_of_another_user_gets_no_connection() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    name = a_name()
    listener = program.listen(name)
    relay = program.Relay(listener, SECRET)
    threading.Thread(target=relay.serve_forever, daemon=True).start()
    code = f"""
import os, socket
os.setuid(65534)
sock = socket.socket(socket.AF_UNIX)
sock.connect("\\0{name}")
assert sock.recv(1) == b""
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=DEADLINE)
    with socket.socket(socket.AF_UNIX) as own:
        own.settimeout(DEADLINE)
        own.connect("\0" + name)
        assert own.recv(1)


def test_a_member_without_a_relay_or_with_one_that_is_gone_connects_directly() -> None:
    run = Run(1)
    session = Session.connect([run.address], 0, SECRET, PATIENT, relay=a_name())
    join_all([session])
    session.agree(1)
    assert session._core.stage is Stage.FOLLOWING
    assert not session._core.in_step
    session._client.close()


def test_a_pause_of_the_whole_node_is_not_taken_for_a_silent_relay() -> None:
    settings = Settings(heartbeat_interval=0.1, heartbeat_timeout=60.0, hang_timeout=3000.0, start_timeout=3000.0)
    run = Run(1, settings)
    session = run.session(0, settings)
    join_all([session])
    client = session._client
    with client.condition:
        client._check_relay(time.monotonic() + 1000.0, late=True)
        assert client._via.name
        client._check_relay(time.monotonic() + 29.0 + 1000.0, late=False)
        assert client._via.name
        client._check_relay(time.monotonic() + 31.0 + 1000.0, late=False)
        assert not client._via.name
    eventually(lambda: session._core.stage is Stage.FOLLOWING and not session._core.in_step, "it connects directly")
    client.close()


def test_a_message_is_not_lost_if_the_kernel_has_no_memory_to_send_it_at_once() -> None:
    session = Run(1).session(0)
    join_all([session])
    client = session._client

    def fail_once(_: object) -> int:
        client._sock = sock
        raise OSError(errno.ENOBUFS, "no memory")

    with client.condition:
        sock, client._sock = client._sock, Mock(send=fail_once)
        session.agree(1)
    client.close()


def test_a_worker_of_a_large_run_leaves_directly_with_all_that_it_knows() -> None:
    """What it presents grows with the number of dead workers, beyond the limit of a message before the proof."""
    run = Run(4000)
    known = Presented.of(Presentation(dead=frozenset(map(WorkerId, range(1, 4000, 2)))))
    leave_directly(run.address, SECRET, [Attach(WorkerId(0), "0f" * 16, "host", 1, known, done=0), Bye(0)])
    eventually(lambda: run.of("left") == ["left"], "it has left")
