"""``python -m recover_megatron.membership.io.relay``: carries the connections of one node's workers to a coordinator.

Without relays, a coordinator of 16,384 workers makes 16,384 system calls to send one message to all of them. With a
relay on each node of eight workers, it makes 2,048, and the heartbeats of a node arrive in one message.

    worker -- Unix socket --.
    worker -- Unix socket ---+-- relay -- one TCP connection -- coordinator
    worker -- Unix socket --'

The relay decides nothing, and reads no message but heartbeats. A worker still proves the secret to the coordinator, and
the coordinator to the worker, through the relay. The relay is a process of its own, because a launcher may be busy or
stopped. If the relay ends or is stopped (``Relaying`` stays out), its workers connect to the coordinator directly.

Only processes of the same user may connect; the name of the socket is no secret.
"""

from __future__ import annotations

import argparse
import errno
import os
import socket
import struct
from collections.abc import Sequence

from recover_megatron.membership.messages import relayed
from recover_megatron.membership.messages.fields import Message
from recover_megatron.membership.messages.to_coordinator import Heartbeat
from recover_megatron.membership.messages.to_member import Beat
from recover_megatron.membership.records import Address
from recover_megatron.membership.wire import MAX_TO_COORDINATOR, MAX_TO_MEMBER, TO_RELAY, Secret, find_secret
from recover_megatron.network.connection import proves
from recover_megatron.network.event_loop import EventLoop
from recover_megatron.network.line import Line
from recover_megatron.network.messages import (
    CHALLENGE,
    MAX_HANDSHAKE,
    PROOF,
    PROTOCOL_VERSION,
    Schema,
    WireError,
    encode,
)
from recover_megatron.network.system import use_all_descriptors, watch

ALIVE_SECONDS = 0.5
"""Seconds between two ``Relaying`` messages to each worker."""
GATHER_SECONDS = 0.02
"""Seconds for which the first heartbeat waits for those of the node's other workers, which send at the same time."""
_MOST_ACCEPTED = 64  # in one round of the event loop, so that a flood of connections keeps no worker waiting
MAX_BACKLOG = 128 << 20
"""Maximum bytes queued for one worker, or for a coordinator that does not read."""

_BEGINNING = b'{"type":"heartbeat",'
DIAL: Schema[relayed.Dial] = Schema(relayed.Dial, MAX_HANDSHAKE)
_HEARTBEAT: Schema[Heartbeat] = Schema(Heartbeat, MAX_HANDSHAKE)


class _Worker:
    """Connection of a worker: one channel."""

    def __init__(self, channel: int, line: Line) -> None:
        self.channel = channel
        self.line = line
        self.coordinator: _Coordinator | None = None
        """The candidate that the worker has dialed; None: none yet."""


class _Coordinator:
    """Connection to a candidate, for all workers that have dialed it."""

    def __init__(self, address: Address, line: Line) -> None:
        self.address = address
        self.line = line
        self.workers: dict[int, _Worker] = {}
        self.reached = False
        """True if the candidate's host has accepted the connection."""
        self.proof = ""
        """The proof that the candidate owes; empty: it has sent no challenge yet."""
        self.proved = False
        self.to: list[int] | None = None
        """Channels for which the next frame is; None: it is a message to the relay."""
        self.beats: list[tuple[int, Heartbeat]] = []
        """Heartbeats that have not been sent yet."""

    def say(self, message: Message, frame: bytes = b"") -> None:
        """Send a message, and the frame that it announces, after the gathered heartbeats.

        Before the proof, nothing is sent: ``workers`` has the channels that are opened after it.
        """
        if self.proved:
            self.send_beats()
            self.line.gather(encode(message) + frame)

    def send_beats(self) -> None:
        if self.beats:
            beats, self.beats = self.beats, []
            self.line.gather(encode(relayed.Beats(beats)))


class Relay:
    """Serves the workers that connect to the Unix socket ``listener``, until the process ends."""

    def __init__(self, listener: socket.socket, secret: Secret) -> None:
        self._listener = listener
        self._secret = secret
        self._loop = EventLoop()
        self._workers: dict[int, _Worker] = {}
        self._coordinators: dict[Address, _Coordinator] = {}
        self._channels = 0
        listener.setblocking(False)
        self._loop.add_reader(listener, self._accept)
        self._loop.call_later(ALIVE_SECONDS, self._show_alive)
        use_all_descriptors()

    def serve_forever(self) -> None:
        while True:
            self._loop.run_once()

    def _show_alive(self) -> None:
        self._loop.call_later(ALIVE_SECONDS, self._show_alive)
        self._loop.add_reader(self._listener, self._accept)
        for worker in list(self._workers.values()):
            self._tell(worker, relayed.Relaying(worker.coordinator is not None and worker.coordinator.reached))

    # -- workers ------------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        for _ in range(_MOST_ACCEPTED):
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # no descriptor is free: else waiting connections would wake this loop all the time
                self._loop.remove_reader(self._listener)
                return
            _, user, _ = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if user != os.geteuid() or len(self._workers) >= relayed.MOST_CHANNELS:
                sock.close()
                continue
            sock.setblocking(False)
            self._channels += 1
            worker = _Worker(self._channels, Line(self._loop, sock))
            self._workers[worker.channel] = worker
            worker.line.on_data(self._read, worker)

    def _tell(self, worker: _Worker, message: Message) -> None:
        self._pass_on(worker, encode(message))

    def _pass_on(self, worker: _Worker, frame: bytes) -> None:
        worker.line.send(frame)
        if worker.line.queued > MAX_BACKLOG:
            self._lose(worker, ended=False, reason="it does not read its messages")

    def _read(self, worker: _Worker) -> None:
        """Read what has arrived from a worker, and pass it on."""
        try:
            is_open = worker.line.receive(1 << 20)  # all that the kernel queues for a Unix socket
            while worker.channel in self._workers:
                if (body := worker.line.decoder.next(MAX_TO_COORDINATOR)) is None:
                    break
                if worker.coordinator is None:
                    self._dial(worker, DIAL.parse(body).address)
                else:
                    self._forward(worker, worker.coordinator, body)
        except WireError as error:
            self._lose(worker, ended=False, reason=f"it sent a malformed message ({error})")
        except OSError as error:
            self._lose(worker, ended=True, reason=f"its connection failed: {error.strerror}")
        else:
            if not is_open:
                self._lose(worker, ended=True, reason="its connection was closed")

    def _forward(self, worker: _Worker, coordinator: _Coordinator, body: bytes) -> None:
        if not coordinator.proved:
            raise WireError("a message before the challenge")
        if body.startswith(_BEGINNING):
            try:
                beat = _HEARTBEAT.parse(body)
            except WireError:
                pass  # the coordinator rejects it
            else:
                if not coordinator.beats:
                    self._loop.call_later(GATHER_SECONDS, coordinator.send_beats)
                coordinator.beats.append((worker.channel, beat))
                if len(coordinator.beats) == relayed.MOST_CHANNELS:
                    coordinator.send_beats()
                return
        coordinator.say(relayed.From(worker.channel), struct.pack(">I", len(body)) + body)
        self._check(coordinator)

    def _check(self, coordinator: _Coordinator) -> None:
        if coordinator.line.queued > MAX_BACKLOG:
            self._give_up(coordinator, "it does not read its messages")

    def _lose(self, worker: _Worker, *, ended: bool, reason: str) -> None:
        """Close a worker's connection, and report its end to its coordinator."""
        if self._workers.pop(worker.channel, None) is None:
            return
        worker.line.close()
        if (coordinator := worker.coordinator) is not None:
            del coordinator.workers[worker.channel]
            coordinator.say(relayed.Closed(worker.channel, ended, reason))
            if not coordinator.proved and not coordinator.workers:
                self._forget(coordinator)

    def _release(self, worker: _Worker, reason: str, *, refused: bool = False) -> None:
        """Close a worker's connection after its queue has been sent, and a last message with the reason."""
        if self._workers.pop(worker.channel, None) is None:
            return
        worker.line.send(encode(relayed.Unreached(reason[:2000], refused)))
        if worker.line.queued:
            worker.line.when_sent = worker.line.close
        else:
            worker.line.close()

    # -- coordinators -------------------------------------------------------------------------------------------------

    def _dial(self, worker: _Worker, address: Address) -> None:
        coordinator = self._coordinators.get(address)
        if coordinator is None:
            try:
                coordinator = self._connect(address)
            except (OSError, ValueError) as error:  # ValueError: a name that is too long, for example
                refused = isinstance(error, ConnectionRefusedError)
                self._release(worker, f"{address[0]}:{address[1]}: {error}", refused=refused)
                return
        worker.coordinator = coordinator
        coordinator.workers[worker.channel] = worker
        if coordinator.reached:
            self._reached(worker, coordinator)
        else:
            self._tell(worker, relayed.Relaying(reached=False))
        coordinator.say(relayed.Opened(worker.channel))

    def _connect(self, address: Address) -> _Coordinator:
        family, kind, protocol, _, place = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if sock.connect_ex(place) not in (0, errno.EINPROGRESS):
                sock.connect(place)  # raises the error
        except OSError:
            sock.close()
            raise
        watch(sock)
        coordinator = self._coordinators[address] = _Coordinator(address, Line(self._loop, sock))
        self._loop.add_writer(sock.fileno(), self._connected, coordinator)
        return coordinator

    def _connected(self, coordinator: _Coordinator) -> None:
        line = coordinator.line
        self._loop.remove_writer(line.descriptor)
        if code := line.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            host, port = coordinator.address
            self._give_up(coordinator, f"{host}:{port}: {os.strerror(code)}", refused=code == errno.ECONNREFUSED)
            return
        coordinator.reached = True
        for worker in list(coordinator.workers.values()):
            self._reached(worker, coordinator)
        line.on_data(self._from_coordinator, coordinator)

    def _reached(self, worker: _Worker, coordinator: _Coordinator) -> None:
        """Send a worker the first ``Relaying(True)``, with a copy of the candidate's connection (``through_relay``)."""
        frame = encode(relayed.Relaying(reached=True))
        try:
            sent = socket.send_fds(worker.line.sock, [frame], [coordinator.line.descriptor])
        except OSError as error:
            self._lose(worker, ended=False, reason=f"it takes no copy of the connection: {error.strerror}")
            return
        assert sent == len(frame)  # nothing else waits in the socket of a worker that has just connected

    def _from_coordinator(self, coordinator: _Coordinator) -> None:
        line = coordinator.line
        try:
            is_open = line.receive(1 << 18)
            while self._coordinators.get(coordinator.address) is coordinator:
                if (body := line.decoder.next(MAX_TO_MEMBER)) is None:
                    break
                if coordinator.proved:
                    self._take(coordinator, body)
                else:
                    self._shake_hands(coordinator, body)
        except WireError as error:
            self._give_up(coordinator, f"not a coordinator: {error}")
        except OSError as error:
            self._give_up(coordinator, f"the connection to the coordinator failed: {error.strerror}")
        else:
            if not is_open:
                self._give_up(coordinator, "the coordinator closed the connection")

    def _shake_hands(self, coordinator: _Coordinator, body: bytes) -> None:
        if not coordinator.proof:
            challenge = CHALLENGE.parse(body)
            if challenge.version != PROTOCOL_VERSION:
                raise WireError(f"it has protocol version {challenge.version}, not {PROTOCOL_VERSION}")
            auth, coordinator.proof = self._secret.answer(challenge)
            coordinator.line.send(encode(auth))
            return
        if not proves(PROOF.parse(body).mac, coordinator.proof):
            raise WireError("the coordinator does not know the job's secret")
        coordinator.proved = True
        coordinator.say(relayed.Relay())
        for channel in coordinator.workers:
            coordinator.say(relayed.Opened(channel))

    def _take(self, coordinator: _Coordinator, body: bytes) -> None:
        """Process one frame of a coordinator."""
        if coordinator.to is not None:
            frame, channels, coordinator.to = struct.pack(">I", len(body)) + body, coordinator.to, None
            for channel in channels:
                if (worker := coordinator.workers.get(channel)) is not None:
                    self._pass_on(worker, frame)
            return
        match TO_RELAY.parse(body):
            case relayed.To(channels):
                coordinator.to = channels
            case relayed.Answers(answers):
                for channel, number in answers:
                    if (worker := coordinator.workers.get(channel)) is not None:
                        self._tell(worker, Beat(number))
            case relayed.Close(channel):
                if (worker := coordinator.workers.pop(channel, None)) is not None:
                    self._release(worker, "the coordinator closed the connection")
            case relayed.Read(channel):
                if (worker := coordinator.workers.get(channel)) is not None:
                    self._read(worker)
                coordinator.say(relayed.WasRead(channel))

    def _give_up(self, coordinator: _Coordinator, reason: str, *, refused: bool = False) -> None:
        """Close the connection to a candidate, and those of its workers, which then dial another one.

        If the candidate has refused the relay's proof, the workers dial it directly, to learn that from their own.
        """
        self._forget(coordinator)
        for worker in list(coordinator.workers.values()):
            if coordinator.proof and not coordinator.proved:
                worker.coordinator = None
                self._lose(worker, ended=False, reason=reason)
            else:
                self._release(worker, reason, refused=refused)
        coordinator.workers.clear()

    def _forget(self, coordinator: _Coordinator) -> None:
        if self._coordinators.get(coordinator.address) is coordinator:
            del self._coordinators[coordinator.address]
            coordinator.line.close()


def listen(name: str) -> socket.socket:
    """Return a listening Unix socket with an abstract name, which needs no file and vanishes with its last process."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind("\0" + name)
    listener.listen(relayed.MOST_CHANNELS)
    return listener


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Carry the connections of a node's workers to the coordinator.")
    parser.add_argument("--listen-fd", type=int, required=True, metavar="FD", help="a listening Unix socket")
    args = parser.parse_args(argv)
    Relay(socket.socket(fileno=args.listen_fd), find_secret()).serve_forever()


if __name__ == "__main__":
    main()
