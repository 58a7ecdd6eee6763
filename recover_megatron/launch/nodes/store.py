"""The rendezvous store of a launch: a torch TCPStore, served by the launcher of node 0; what launchers believe of it
(``Seal``), and what they are told of each other (``NodeEvents``).

Its socket is bound, and listens, before anything is started, so no port can be lost in between, and workers that
connect early wait in its backlog.  The only module of launch/ that imports torch, and only inside its functions:
importing takes seconds, so it is done in a thread while the workers start.
"""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import ipaddress
import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from recover_megatron.launch.command_line.plan import BACKLOG, Address, Candidates
from recover_megatron.launch.workers.states import ExitOutcome
from recover_megatron.membership.wire import Secret
from recover_megatron.network import connection

PREFIX = "recover/launch/"
"""Of the launchers' own keys."""
BEAT_SECONDS = 2.0
TIMEOUT = timedelta(minutes=30)
_RETRY_SECONDS = 0.25
_NAME_SECONDS = 1.0


class Store(Protocol):
    """What peers.py uses of torch's Store."""

    def get(self, key: str, /) -> bytes: ...
    def set(self, key: str, value: str, /) -> None: ...
    def check(self, keys: list[str], /) -> bool: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...
    def queue_push(self, key: str, value: str, /) -> None: ...
    def queue_pop(self, key: str, /) -> bytes: ...
    def set_timeout(self, timeout: timedelta, /) -> None: ...


def serve_store(address: str, listener: socket.socket) -> Store:
    """Serve a store on ``listener``, whose ownership passes to it.  Raises RuntimeError or ImportError."""
    tcp_store, port = _tcp_store_class(), listener.getsockname()[1]
    descriptor = listener.detach()
    return tcp_store(address, port, None, True, timeout=TIMEOUT, wait_for_workers=False, master_listen_fd=descriptor)


def join_store(address: str, port: int, refused: bool = True) -> Store:
    """Connect to the store of node 0, waiting until its port answers.  Raises RuntimeError or ImportError.

    It waits for as long as it takes: the caller, in a thread, is given up by the supervisor's own deadline.
    ``refused``: whether to wait for a host that answers, but has nobody at the port; else ConnectionRefusedError.
    """
    while True:
        try:
            socket.create_connection((address, port), timeout=10).close()
            break
        except OSError as error:
            if isinstance(error, ConnectionRefusedError) and not refused:
                raise
            time.sleep(_RETRY_SECONDS)  # another host's port gives no event to wait for
    return _tcp_store_class()(address, port, None, False, timeout=TIMEOUT)


def timed_out(error: RuntimeError) -> bool:
    """Whether ``error``, raised by a store operation, only means that nothing happened in the time allowed."""
    from torch.distributed import DistStoreError

    return isinstance(error, DistStoreError)


def one_line(error: BaseException) -> str:
    """What to tell people of an error of the store, whose text may hold a C++ stack."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _tcp_store_class() -> Any:
    # What goes wrong here is said by the supervisor in one line, without C++ stack traces beside it.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    _load_libraries()
    from torch.distributed import TCPStore

    return TCPStore


def _load_libraries() -> None:
    """Load torch's big libraries without holding the interpreter's lock.

    An import holds it while it loads libraries, a second or, from a slow file system, many: for that long the
    supervisor would see no death and no signal.  A foreign call releases it; the import then finds the libraries
    loaded.  Where they are not found so, the import does it all.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.restype = ctypes.c_void_p
    dlopen.argtypes = [ctypes.c_char_p, ctypes.c_int]
    libraries = Path(spec.origin).parent / "lib"
    # The flags are those of torch's own import.
    dlopen(os.fsencode(libraries / "libtorch_global_deps.so"), os.RTLD_NOW | os.RTLD_GLOBAL)
    dlopen(os.fsencode(libraries / "libtorch.so"), os.RTLD_NOW)


def open_listener(address: str, port: int, nnodes: int) -> tuple[socket.socket | None, str | None]:
    """Bind and listen on ``address``:``port`` (0: a free port).  Returns the socket, or None and the reason.

    Only ``address`` is bound, never all interfaces, with one exception: a host name that this host resolves to its own
    loopback (as Debian's /etc/hosts does), which the other nodes resolve to the real interface.
    """
    found, reason = resolve(address)
    if reason:
        return None, reason
    for family, ip in found:
        bind_to = "" if nnodes > 1 and _hides_interface(address, ip) else ip
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((bind_to, port))
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            reason = _bind_reason(error, address, port, nnodes)
            if error.errno == errno.EADDRNOTAVAIL:
                continue
            return None, reason
        return listener, None
    return None, reason


def resolve(address: str) -> tuple[list[tuple[socket.AddressFamily, str]], str | None]:
    """The addresses of the name ``address``; or none, and the reason."""
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return [], (
            f"--master-addr {address} is not known on host {socket.gethostname()} ({error}): "
            "give a host name or an address that every node can reach"
        )
    # IPv4 first: "localhost" usually means both, and a worker may try only the first it gets.
    in_order = sorted(found, key=lambda entry: entry[0] != socket.AF_INET)
    return [(family, str(name[0])) for family, _, _, _, name in in_order], None


def await_names(option: str, names: Sequence[str], seconds: float, say: Callable[[str], None]) -> str | None:
    """Wait until one of ``names`` is known here, ``seconds`` at most: that of a new pod takes a while.

    Returns why none is.  ``option``: where the names are from; ``say``: told once, if there is something to wait for.
    """
    until, told = time.monotonic() + seconds, False
    while (error := _why_unknown(names)) is not None:
        why = f"{option} {','.join(names)} is not known on host {socket.gethostname()} ({error})"
        if not isinstance(error, socket.gaierror) or time.monotonic() >= until:
            return f"{why}: give a host name or an address that every node can reach"
        if not told:
            told = True
            say(f"{why} yet: asking again, for {seconds:g} s at most (--rendezvous-timeout)")
        time.sleep(_NAME_SECONDS)  # name servers give no event to wait for
    return None


def _why_unknown(names: Sequence[str]) -> OSError | UnicodeError | None:
    """None: one of them is known."""
    why: OSError | UnicodeError | None = None
    for name in names:
        try:
            socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            why = error
        else:
            return None
    return why


def _hides_interface(address: str, ip: str) -> bool:
    if address == "localhost":
        return False
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return ipaddress.ip_address(ip.partition("%")[0]).is_loopback
    return False


def _bind_reason(error: OSError, address: str, port: int, nnodes: int) -> str:
    host = socket.gethostname()
    if error.errno == errno.EADDRINUSE and port == 0:
        return f"no free port on host {host}: end the programs that hold them"
    if error.errno == errno.EADDRINUSE:
        fix = (
            "leave it out for a free one"
            if nnodes == 1
            else "make sure that node rank 0 is started once; the port must be the same on every node"
        )
        return f"port {port} on host {address} is in use by another process: choose another --master-port or {fix}"
    if error.errno == errno.EADDRNOTAVAIL:
        return (
            f"--master-addr {address} is not an address of this host ({host}), but node rank 0 keeps the store: "
            "start node rank 0 there, or give an address of this host"
        )
    if error.errno == errno.EACCES:
        return f"port {port} on host {address} may not be used by this user: choose a --master-port above 1023"
    return f"the store cannot listen on {address}, port {port}: {error.strerror or error}"


class NodeEvents(Protocol):
    """What the threads that talk to the other launchers tell this one.  The event loop calls it in the main thread."""

    def note(self, text: str) -> None: ...  # for people
    def failed(self, reason: str, code: int, without: tuple[int, ...] = ()) -> None: ...  # the launch ends here;
    # ``without``: START_AGAIN, without these nodes
    def coordinators(self, candidates: Candidates) -> None: ...  # all are known

    # Node 0.
    def store_failed(self, reason: str) -> None: ...  # it is not served
    def welcomed(self, node_rank: int, door: Address) -> None: ...  # it takes part, and has a door
    def report(self, node_rank: int, outcomes: list[ExitOutcome]) -> None: ...  # its workers have ended so
    def node_lost(self, node_rank: int) -> None: ...  # its launcher is silent, and has not reported
    def node_back(self, node_rank: int) -> None: ...

    # Other nodes.
    def accepted(self, run_id: str) -> None: ...  # this node takes part in the run
    def store_lost(self, reason: str) -> None: ...  # the store of node 0 is gone, or not reached
    def store_back(self) -> None: ...
    def goes_on(self) -> bool: ...  # the run is under way with workers of this node; in any thread
    def delivered(self) -> None: ...  # our report is in the store, or the store is gone


_LONGEST = 1024 * 1024


class Unproved(ValueError):
    """The value is not of a launcher of this run: it is not to be believed."""


class Seal:
    """Proves what launchers put into the store, which anybody on the network can read and write.

    A value is JSON text with a MAC by the job's secret over the key, the run and the text, so that it cannot be forged,
    put under another key, or taken from another run of the same secret.  A run's id is random and made by node 0; that
    a ``job`` is not of an earlier run shows when node 0 answers a node's own nonce (peers.py).  An old value of the
    same run can be put back: counters in the values, and that all of them only ever say more, make that harmless.

    ``secret``: None where the launchers share none: they have nothing to tell a stranger's word by (docs/security.md).
    """

    def __init__(self, secret: Secret | None) -> None:
        self._key = secret.key("launch") if secret else None

    @property
    def proves(self) -> bool:
        return self._key is not None

    def wrap(self, key: str, run_id: str, value: Any) -> str:
        """What to put under ``key``; ``run_id``: empty before it is known."""
        text = json.dumps(value)
        return json.dumps({"text": text, "mac": self._mac(key, run_id, text)})

    def open(self, key: str, run_id: str, data: bytes) -> Any:
        """The value.  Raises ``Unproved``, and ValueError for what is no such value at all."""
        if len(data) > _LONGEST:
            raise ValueError(f"a value of {len(data)} bytes")
        try:
            wrapped = json.loads(data)
            text, mac = wrapped["text"], wrapped["mac"]
            if not isinstance(text, str) or not isinstance(mac, str):
                raise ValueError("not a launcher's value")
            if self._key is not None and not connection.proves(mac, self._mac(key, run_id, text)):
                raise Unproved("it does not prove the job's secret")
            return json.loads(text)
        except (TypeError, KeyError, RecursionError, UnicodeDecodeError, UnicodeEncodeError) as error:
            raise ValueError("not a launcher's value") from error

    def peek(self, data: bytes) -> Any:
        """The value without its proof: to tell people what may be wrong, for nothing else.  Raises ValueError."""
        return Seal(None).open("", "", data)

    def _mac(self, key: str, run_id: str, text: str) -> str:
        if self._key is None:
            return ""
        return connection.mac(self._key, key, run_id, text).hex()
