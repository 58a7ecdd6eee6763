"""Handshake of a ring's member with both neighbours; each side proves that it knows the secret and is in this ring.

    connecting (sender)                                  accepting (receiver)
        |  <------------------ nonce A (16) ---------------- |
        |  -- nonce B (16), HMAC(secret, "send" A B ring) ->  |      if the HMAC is wrong: closed
        |  <------ HMAC(secret, "receive" A B ring) --------  |

``ring`` names the group, the epoch and both ranks, and is unique in the job.  So a connection of another epoch, column
or rank is refused.  All lengths are fixed, so nothing is parsed.  Every incoming connection is a *candidate*.  The
candidates are served concurrently until one of them is authenticated, so a silent candidate does not block another.  A
candidate must send its proof within ``PROOF_SECONDS``.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import socket
import time
from pathlib import Path

import torch

from recover_megatron.collectives.epoch import CancelToken, PeerLost
from recover_megatron.network import connection
from recover_megatron.network.connection import listen
from recover_megatron.network.system import close_in_children, forget

NONCE, MAC = 16, 32
CONNECT_SECONDS = 5.0
"""Time limit in seconds to connect to the successor; its kernel accepts the connection even if the worker hangs."""
PROOF_SECONDS = 5.0
FULL_SECONDS = 0.25
"""Pause in seconds before this process accepts connections again after it had no free file descriptor."""
MAX_CANDIDATES = 64
"""Maximum number of candidates at a time; when another one connects, the oldest candidate is dropped."""


class Refused(Exception):
    """The process at the other end of a connection does not belong to this ring."""


def _mac(secret: bytes, role: str, nonces: bytes, ring: bytes) -> bytes:
    return connection.mac(secret, "ring", role, nonces.hex(), ring.hex())


class _Conversation:
    """Side of a handshake, connecting or accepting, on a non-blocking socket.

    When the socket is readable, the caller calls ``step``, until it returns True.
    """

    def __init__(self, sock: socket.socket, secret: bytes, ring: bytes) -> None:
        self.sock = sock
        self.since = time.monotonic()
        self._secret = secret
        self._ring = ring
        self._received = b""
        self._nonce = os.urandom(NONCE)

    def _receive(self, length: int) -> bool:
        """Receive the available bytes, without blocking; return whether all ``length`` bytes have arrived."""
        try:
            data = self.sock.recv(length - len(self._received))
        except BlockingIOError:
            return False
        if not data:
            raise Refused("the peer closed the connection during the handshake")
        self._received += data
        return len(self._received) == length

    def _send(self, data: bytes) -> None:
        if self.sock.send(data) != len(data):  # never true: the send buffer of a new connection has room for 48 bytes
            raise Refused("the connection does not accept the handshake")

    def step(self) -> bool:
        raise NotImplementedError


class _Accepting(_Conversation):
    def __init__(self, sock: socket.socket, secret: bytes, ring: bytes) -> None:
        super().__init__(sock, secret, ring)
        self._send(self._nonce)

    def step(self) -> bool:
        if not self._receive(NONCE + MAC):
            return False
        nonces = self._nonce + self._received[:NONCE]
        if not connection.proves(self._received[NONCE:], _mac(self._secret, "send", nonces, self._ring)):
            raise Refused("the peer does not know the secret, or belongs to another ring")
        self._send(_mac(self._secret, "receive", nonces, self._ring))
        return True


class _Connecting(_Conversation):
    _nonces = b""

    def step(self) -> bool:
        if not self._nonces:
            if not self._receive(NONCE):
                return False
            self._nonces, self._received = self._received + self._nonce, b""
            self._send(self._nonce + _mac(self._secret, "send", self._nonces, self._ring))
        if not self._receive(MAC):
            return False
        if not connection.proves(self._received, _mac(self._secret, "receive", self._nonces, self._ring)):
            raise Refused("the peer does not know the secret, or belongs to another ring")
        return True


class Handshake:
    """Handshakes of one member with both neighbours, on both connections concurrently.

    ``listener``: accepts the predecessor's connection.  ``wake``: descriptor that becomes readable when the token is
    cancelled.
    """

    def __init__(self, listener: socket.socket, cancel_token: CancelToken, wake: int, secret: bytes) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._cancel_token = cancel_token
        self._wake = wake
        self._secret = secret
        self._closed_until = 0.0

    def hold(self, out: socket.socket, out_ring: bytes, in_ring: bytes, timeout: float) -> socket.socket:
        """Do the handshakes with the successor, on ``out``, and the predecessor; return the predecessor's connection.

        ``out``: non-blocking socket on which ``connect`` was called.  ``out_ring``, ``in_ring``: names of the ring for
        the two connections.  ``timeout``: time limit in seconds.  Raises ``EpochRevoked``, ``TimeoutError``, and
        ``PeerLost`` if the successor is unreachable or refuses this member.
        """
        deadline = time.monotonic() + timeout
        outgoing: _Conversation | None = _Connecting(out, self._secret, out_ring)
        incoming: socket.socket | None = None
        candidates: dict[int, _Conversation] = {}
        try:
            while outgoing or incoming is None:
                ready = self._poll(outgoing, candidates, incoming is None, deadline)
                if outgoing and out.fileno() in ready and self._step_out(outgoing):
                    outgoing = None
                if incoming is None:
                    if self._listener.fileno() in ready:
                        self._admit(candidates, in_ring)
                    incoming = self._first_right_one(candidates, ready)
            return incoming
        except BaseException:
            if incoming is not None:
                incoming.close()
            raise
        finally:
            for candidate in candidates.values():
                candidate.sock.close()

    def _poll(
        self, outgoing: _Conversation | None, candidates: dict[int, _Conversation], accepting: bool, deadline: float
    ) -> set[int]:
        now = time.monotonic()
        poll, until = select.poll(), deadline
        poll.register(self._wake, select.POLLIN)
        if accepting and now >= self._closed_until:
            poll.register(self._listener.fileno(), select.POLLIN)
        elif accepting:
            until = min(until, self._closed_until)
        for fd in candidates:
            poll.register(fd, select.POLLIN)
        if candidates:
            until = min(until, next(iter(candidates.values())).since + PROOF_SECONDS)
        if outgoing:
            poll.register(outgoing.sock.fileno(), select.POLLIN)
            if not _is_connected(outgoing.sock):
                until = min(until, outgoing.since + CONNECT_SECONDS)
        ready = poll.poll(max(0.0, until - now) * 1000)
        self._cancel_token.check()
        if not ready:
            self._give_up_on(outgoing, candidates, deadline)
        return {fd for fd, _ in ready}

    @staticmethod
    def _give_up_on(outgoing: _Conversation | None, candidates: dict[int, _Conversation], deadline: float) -> None:
        """Drop candidates whose time is over; raise if the time limit of the successor or of the handshake is over."""
        now = time.monotonic()
        for fd in [fd for fd, candidate in candidates.items() if now >= candidate.since + PROOF_SECONDS]:
            candidates.pop(fd).sock.close()
        if outgoing and now >= outgoing.since + CONNECT_SECONDS and not _is_connected(outgoing.sock):
            raise PeerLost(
                f"the host of the successor in the ring did not answer within {CONNECT_SECONDS:g} s", unreachable=True
            )
        if now > deadline:
            missing = "successor" if outgoing else "predecessor"
            raise TimeoutError(f"the {missing} in the ring did not connect within the time limit")

    def _step_out(self, outgoing: _Conversation) -> bool:
        try:
            return outgoing.step()
        except (Refused, OSError) as error:
            unreachable = isinstance(error, OSError) and not isinstance(error, (ConnectionResetError, BrokenPipeError))
            raise PeerLost(
                f"the successor in the ring refused the connection: {error}", unreachable=unreachable
            ) from error

    def _admit(self, candidates: dict[int, _Conversation], ring: bytes) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:  # the process has no free descriptor: drop all candidates, and accept again after a pause
            while candidates:
                candidates.popitem()[1].sock.close()
            self._closed_until = time.monotonic() + FULL_SECONDS
            return
        sock.setblocking(False)
        if len(candidates) >= MAX_CANDIDATES:
            candidates.pop(next(iter(candidates))).sock.close()
        try:
            candidates[sock.fileno()] = _Accepting(sock, self._secret, ring)
        except (Refused, OSError):
            sock.close()

    def _first_right_one(self, candidates: dict[int, _Conversation], ready: set[int]) -> socket.socket | None:
        for fd in ready & candidates.keys():
            try:
                if candidates[fd].step():
                    return candidates.pop(fd).sock
            except (Refused, OSError):  # ignored: the candidate is a foreign process, or a neighbour that has died
                candidates.pop(fd).sock.close()
        return None


def _is_connected(sock: socket.socket) -> bool:
    try:
        sock.getpeername()
    except OSError:
        return False
    return True


def machine() -> str:
    """Return a string that is equal in two processes if each of them may open the descriptors of the other in /proc.

    The string contains the boot id and the namespaces; it is "-" if the system does not provide these.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}/{os.stat('/proc/self/ns/user').st_ino}"
    except OSError:
        return "-"


class SharedMemory:
    """Memory that two neighbours on one host share: ``count`` slots of ``size`` bytes.

    The receiver creates the memory (anonymous, sealed against shrinking), and the sender maps it.  Only the sender may
    use a free slot.  It writes a segment to the slot, then sends a message header with the slot's number.  From then on
    only the receiver may use the slot, until it returns the number in one byte.  If the sender dies while it writes, it
    has not sent the header, so the receiver never reads a partial segment.
    """

    def __init__(self, descriptor: int, count: int, size: int) -> None:
        self.descriptor = descriptor
        self.count = count
        self._size = size
        self._memory = torch.frombuffer(mmap.mmap(descriptor, count * size), dtype=torch.uint8)
        self._views: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}

    @classmethod
    def make(cls, count: int, size: int) -> SharedMemory | None:
        """Create the memory; return None if memfd_create does not exist or a limit of file sizes forbids it."""
        try:
            descriptor = os.memfd_create("ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except (AttributeError, OSError):
            return None
        try:
            os.ftruncate(descriptor, count * size)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            return cls(descriptor, count, size)
        except (AttributeError, OSError):
            os.close(descriptor)
            return None

    @classmethod
    def open(cls, pid: int, descriptor: int, count: int, size: int) -> SharedMemory | None:
        """Map the memory that process ``pid`` on this host has created; return None if the system forbids this.

        ``descriptor``: number of the memory's file descriptor in that process.
        """
        try:
            own = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
            if fcntl.fcntl(own, fcntl.F_GET_SEALS) & seals != seals or os.fstat(own).st_size != count * size:
                raise OSError("the descriptor is not shared memory of a ring")
        except (AttributeError, OSError):
            os.close(own)
            return None
        return cls(own, count, size)

    def view(self, slot: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a view of the first ``numel`` elements of a slot, as ``dtype``."""
        key = slot, numel, dtype
        view = self._views.get(key)
        if view is None:
            if len(self._views) > 256:
                self._views.clear()
            start = slot * self._size
            view = self._views[key] = self._memory[start : start + numel * dtype.itemsize].view(dtype)
        return view

    def close(self) -> None:
        """Release the memory; the system frees it when no process and no tensor uses it any more."""
        os.close(self.descriptor)
        self._views.clear()
        self._memory = torch.empty(0, dtype=torch.uint8)


_BACKLOG = 128


class RingListener:
    """Listening socket to which the predecessor in a ring connects, and shared memory for a predecessor on this host.

    A worker can create it before the members of the ring are known, and send ``address`` in the status with which it
    joins an epoch.  Then the plan contains all addresses, and no key-value store is needed.

    ``host``: address of this machine that the other members can reach.  ``slots``: (number of slots, bytes per slot) of
    the shared memory.  If it is None, or if the system provides no shared memory, all data goes over TCP.
    """

    def __init__(self, host: str, slots: tuple[int, int] | None) -> None:
        self.listener, address = listen(host, _BACKLOG)
        self._slots = SharedMemory.make(*slots) if slots and machine() != "-" else None
        offer = f"{machine()}:{os.getpid()}:{self._slots.descriptor}" if self._slots else "-"
        self.address = f"{address} {offer}"
        """Text from which the predecessor finds the socket and the shared memory: "HOST PORT OFFER"."""
        close_in_children(self)

    def take_slots(self) -> SharedMemory | None:
        """Return the shared memory, or None; from now on the caller must close it."""
        slots, self._slots = self._slots, None
        return slots

    def close(self) -> None:
        """Close the socket and the shared memory; idempotent."""
        forget(self)
        self.listener.close()
        if (slots := self.take_slots()) is not None:
            slots.close()

    close_in_child = close
    """Called in a process forked from the worker, such as a data loader: it must not keep the listener open."""
