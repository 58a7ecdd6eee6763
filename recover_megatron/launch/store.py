"""The rendezvous store of a launch: a torch TCPStore, served by the launcher of node 0.

The only module of launch/ that imports torch, and only inside its functions: importing takes seconds, so it is done in
a thread while the workers start, on a socket that has been listening since before.  Workers that connect earlier wait
in its backlog.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

PREFIX = "recover/launch/"
"""Of the launchers' own keys."""
BEAT_SECONDS = 2.0
TIMEOUT = timedelta(minutes=30)
_RETRY_SECONDS = 0.25


class Store(Protocol):
    """What nodes.py uses of torch's Store."""

    def get(self, key: str, /) -> bytes: ...
    def set(self, key: str, value: str, /) -> None: ...
    def check(self, keys: list[str], /) -> bool: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...
    def queue_push(self, key: str, value: str, /) -> None: ...
    def queue_pop(self, key: str, /) -> bytes: ...
    def set_timeout(self, timeout: timedelta, /) -> None: ...


def serve_store(address: str, listener: socket.socket) -> Store:
    """Serve a store on ``listener``, whose ownership passes to it.  Raises RuntimeError or ImportError."""
    tcp_store = _tcp_store_class()
    port = listener.getsockname()[1]
    return tcp_store(
        address,
        port,
        None,
        True,
        timeout=TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


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
