"""The store's listening socket, bound by the launcher before anything is started, so no port can be lost in between."""

from __future__ import annotations

import errno
import ipaddress
import socket

BACKLOG = 4096
"""Workers may all connect before the store serves: they wait here.  The kernel lowers it to net.core.somaxconn."""


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
