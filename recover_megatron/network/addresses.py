"""Addresses of workers as text, "host port", and sockets for them."""

from __future__ import annotations

import socket

from recover_megatron.network.silence import watch


def family_of(host: str) -> socket.AddressFamily:
    """IPv6 for an address with colons, else IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def listen(host: str, backlog: int) -> tuple[socket.socket, str]:
    """A listener at a free port of ``host`` (this machine's address that others reach), and its address as text."""
    listener = socket.create_server((host, 0), family=family_of(host), backlog=backlog)
    return listener, f"{host} {listener.getsockname()[1]}"


def connect(address: str, timeout: float) -> socket.socket:
    """A connection without delays, watched for silence. ``OSError``; ``ValueError`` for what is no address."""
    host, port = address.split(" ")
    sock = socket.create_connection((host, int(port)), timeout=timeout)
    watch(sock)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock
