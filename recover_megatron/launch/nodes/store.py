"""Rendezvous store of a launch, a torch TCPStore that the launcher of node 0 serves; the authentication of its values
(``Seal``), and the events of the other launchers (``NodeEvents``).

The store's socket listens before any process is started, so no other process can take the port meanwhile, and workers
that connect early wait in the backlog.  In launch/, only this module and device_test.py import torch, and only inside
functions: the import takes seconds, so it runs in a thread while the workers start.
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

from recover_megatron.launch.nodes.addresses import BACKLOG, Address, Candidates
from recover_megatron.launch.workers.states import ExitOutcome
from recover_megatron.membership.wire import Secret
from recover_megatron.network import connection

PREFIX = "recover/launch/"
"""Prefix of all keys that launchers use in the store."""
BEAT_SECONDS = 2.0
TIMEOUT = timedelta(minutes=30)
_RETRY_SECONDS = 0.25
_NAME_SECONDS = 1.0


class Store(Protocol):
    """Methods of torch's Store that launchers use."""

    def get(self, key: str, /) -> bytes: ...
    def set(self, key: str, value: str, /) -> None: ...
    def check(self, keys: list[str], /) -> bool: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...
    def queue_push(self, key: str, value: str, /) -> None: ...
    def queue_pop(self, key: str, /) -> bytes: ...
    def set_timeout(self, timeout: timedelta, /) -> None: ...


def serve_store(address: str, listener: socket.socket) -> Store:
    """Serve a store on ``listener``, which the store owns from now on.  Raises RuntimeError or ImportError."""
    tcp_store, port = _tcp_store_class(), listener.getsockname()[1]
    descriptor = listener.detach()
    return tcp_store(address, port, None, True, timeout=TIMEOUT, wait_for_workers=False, master_listen_fd=descriptor)


def join_store(address: str, port: int, refused: bool = True) -> Store:
    """Connect to the store of node 0, waiting until its port answers.  Raises RuntimeError or ImportError.

    The wait has no limit; the supervisor ignores the calling thread after a deadline.  ``refused``: True to wait also
    while the host refuses connections, False to raise ConnectionRefusedError then.
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
    """Return whether ``error``, raised by a store operation, is only a timeout."""
    from torch.distributed import DistStoreError

    return isinstance(error, DistStoreError)


def one_line(error: BaseException) -> str:
    """Return the first line of a store's error, without the C++ stack that may follow."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _tcp_store_class() -> Any:
    # The supervisor reports errors in one line, without C++ stack traces.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    _load_libraries()
    from torch.distributed import TCPStore

    return TCPStore


def _load_libraries() -> None:
    """Load torch's big libraries without holding the GIL.

    An import holds the GIL while it loads libraries, for a second, or many seconds from a slow file system; meanwhile
    the supervisor would notice no death and no signal.  A ctypes call releases the GIL, and torch's import then finds
    the libraries loaded.  If this function does not find the libraries, the import loads them.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.restype = ctypes.c_void_p
    dlopen.argtypes = [ctypes.c_char_p, ctypes.c_int]
    libraries = Path(spec.origin).parent / "lib"
    # The same flags as torch's import uses.
    dlopen(os.fsencode(libraries / "libtorch_global_deps.so"), os.RTLD_NOW | os.RTLD_GLOBAL)
    dlopen(os.fsencode(libraries / "libtorch.so"), os.RTLD_NOW)


def open_listener(address: str, port: int, nnodes: int) -> tuple[socket.socket | None, str | None]:
    """Bind and listen on ``address``:``port`` (0: a free port).  Return the socket, or None and the reason.

    The socket is bound to ``address`` only, with one exception: if this host resolves its name to loopback (as Debian's
    /etc/hosts does), other nodes resolve the name to the real interface, so the socket is bound to all interfaces.
    """
    found, reason = resolve(address)
    if reason:
        return None, reason
    for family, ip in found:
        bind_to = "" if nnodes > 1 and _hides_interface(address, ip) else ip
        try:
            # Listen on IPv4, too, if ``bind_to`` means all interfaces.
            both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
            listener = socket.create_server((bind_to, port), family=family, backlog=BACKLOG, dualstack_ipv6=both)
        except OSError as error:
            reason = _bind_reason(error, address, port, nnodes)
            if error.errno == errno.EADDRNOTAVAIL:
                continue
            return None, reason
        return listener, None
    return None, reason


def resolve(address: str) -> tuple[list[tuple[socket.AddressFamily, str]], str | None]:
    """Resolve the name ``address``; return its addresses, or none and the reason."""
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return [], (
            f"--master-addr {address} cannot be resolved on host {socket.gethostname()} ({error}): "
            "give a host name or an address that every node can reach"
        )
    # IPv4 first: "localhost" usually means both, and a worker may try only the first address.
    in_order = sorted(found, key=lambda entry: entry[0] != socket.AF_INET)
    return [(family, str(name[0])) for family, _, _, _, name in in_order], None


def await_names(option: str, names: Sequence[str], seconds: float, say: Callable[[str], None]) -> str | None:
    """Wait at most ``seconds`` until one of ``names`` can be resolved: the name of a new pod takes a while to appear.

    Return the reason if none can be resolved.  ``option``: flag that gave the names; ``say``: logs once that it waits.
    """
    until, announced = time.monotonic() + seconds, False
    while (error := _why_unknown(names)) is not None:
        why = f"{option} {','.join(names)} cannot be resolved on host {socket.gethostname()} ({error})"
        if not isinstance(error, socket.gaierror) or time.monotonic() >= until:
            return f"{why}: give a host name or an address that every node can reach"
        if not announced:
            announced = True
            say(f"{why} yet: trying again, for at most {seconds:g} s (--rendezvous-timeout)")
        time.sleep(_NAME_SECONDS)  # name servers give no event to wait for
    return None


def _why_unknown(names: Sequence[str]) -> OSError | UnicodeError | None:
    """Return the last error of resolving ``names``; None if at least one name can be resolved."""
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
        return f"no free port on host {host}: stop programs that use many ports"
    if error.errno == errno.EADDRINUSE:
        fix = (
            "leave it out to use a free port"
            if nnodes == 1
            else "make sure that node rank 0 is started only once; the port must be the same on every node"
        )
        return f"port {port} on host {address} is in use by another process: choose another --master-port or {fix}"
    if error.errno == errno.EADDRNOTAVAIL:
        return (
            f"--master-addr {address} is not an address of this host ({host}), but node rank 0 serves the store: "
            "start node rank 0 on that host, or give an address of this host"
        )
    if error.errno == errno.EACCES:
        return f"port {port} on host {address} may not be used by this user: choose a --master-port above 1023"
    return f"the store cannot listen on {address}, port {port}: {os.strerror(error.errno or 0)}"


class NodeEvents(Protocol):
    """Callbacks for messages of other launchers: called in the main thread, but ``run_continues`` in any thread."""

    def note(self, text: str) -> None: ...  # log ``text``
    def failed(self, reason: str, code: int, without: tuple[int, ...] = ()) -> None: ...  # this node must stop;
    # ``without``: if ``code`` is START_AGAIN, the nodes that the next start leaves out
    def coordinators(self, candidates: Candidates) -> None: ...  # the addresses of all candidates are known

    # The following callbacks are called on node 0 only.
    def store_failed(self, reason: str) -> None: ...  # the store cannot be served
    def welcomed(self, node_rank: int, door: Address) -> None: ...  # node 0 has admitted a node with this door
    def report(self, node_rank: int, outcomes: list[ExitOutcome]) -> None: ...  # a node reports its workers' ends
    def node_lost(self, node_rank: int) -> None: ...  # a launcher has been silent for too long
    def node_back(self, node_rank: int) -> None: ...  # a launcher that counted as lost has written again

    # The following callbacks are called on other nodes.
    def accepted(self, run_id: str) -> None: ...  # node 0 has admitted this node
    def store_lost(self, reason: str) -> None: ...  # the store of node 0 is lost or unreachable
    def store_back(self) -> None: ...
    def run_continues(self) -> bool: ...  # True if the run is under way with workers of this node
    def delivered(self) -> None: ...  # this node's report is in the store, or the store is lost


_LONGEST = 1024 * 1024


class Unproved(ValueError):
    """Error for a value in the store that no launcher of this run has written."""


class Seal:
    """Authenticates the launchers' values in the store, which any host on the network can read and write.

    A value is JSON text with a MAC of the key, the run id and the text, computed with the job's secret.  So a value
    cannot be forged, put under another key, or copied from another run with the same secret.  Node 0 chooses a random
    run id; when it answers with a node's nonce, that proves that ``job`` is not from an earlier run (peers.py).  An old
    value of the same run can be replayed, which is harmless: values have counters and only ever add information.

    ``secret``: None if the launchers share no secret; values cannot be authenticated then (docs/security.md).
    """

    def __init__(self, secret: Secret | None) -> None:
        self._key = secret.key("launch") if secret else None

    @property
    def proves(self) -> bool:
        return self._key is not None

    def wrap(self, key: str, run_id: str, value: Any) -> str:
        """Return ``value`` sealed for ``key``; ``run_id``: empty for ``job``, whose readers do not know the id yet."""
        text = json.dumps(value)
        return json.dumps({"text": text, "mac": self._mac(key, run_id, text)})

    def open(self, key: str, run_id: str, data: bytes) -> Any:
        """Return the value in ``data``.  Raises ``Unproved`` if the MAC is wrong, ValueError if there is no seal."""
        if len(data) > _LONGEST:
            raise ValueError(f"the value is too long: {len(data)} bytes")
        try:
            wrapped = json.loads(data)
            text, mac = wrapped["text"], wrapped["mac"]
            if not isinstance(text, str) or not isinstance(mac, str):
                raise ValueError("the value does not have the format of a launcher's value")
            if self._key is not None and not connection.proves(mac, self._mac(key, run_id, text)):
                raise Unproved("its writer does not have the job's secret")
            return json.loads(text)
        except (TypeError, KeyError, RecursionError, UnicodeDecodeError, UnicodeEncodeError) as error:
            raise ValueError("the value does not have the format of a launcher's value") from error

    def peek(self, data: bytes) -> Any:
        """Return the value in ``data`` without checking its MAC, to explain a refusal.  Raises ValueError."""
        return Seal(None).open("", "", data)

    def _mac(self, key: str, run_id: str, text: str) -> str:
        if self._key is None:
            return ""
        return connection.mac(self._key, key, run_id, text).hex()
