"""Proof of the job's secret: a mutual HMAC-SHA256 challenge with fresh nonces on both sides.

    server -> client   its nonce
    client -> server   its nonce, and the proof of the client's role for both nonces
    server -> client   the proof of the server's role for both nonces

The role in the text keeps a proof from being sent back as one's own, the purpose keeps one from being used in another
protocol of the run. A server does nothing for a connection before it has the client's proof; a client believes nothing
before it has the server's. The secret itself never travels. What follows is neither encrypted nor signed
(docs/security.md). Everything of the run that proves the secret does it by ``mac``.
"""

from __future__ import annotations

import hmac
import secrets


def nonce() -> str:
    """32 fresh random bytes, in hex."""
    return secrets.token_hex(32)


def mac(secret: bytes, *parts: str) -> bytes:
    """The proof (32 bytes) of knowing ``secret`` for ``parts``: purpose, role, then what was agreed on."""
    return hmac.digest(secret, "|".join(parts).encode(), "sha256")


def proves(told: object, expected: str | bytes) -> bool:
    """Whether ``told`` (whatever came over the network) is the proof ``expected``, compared in constant time."""
    if isinstance(told, str) and isinstance(expected, str):
        return hmac.compare_digest(told.encode(errors="replace"), expected.encode())
    if isinstance(told, bytes) and isinstance(expected, bytes):
        return hmac.compare_digest(told, expected)
    return False


class Challenge:
    """The challenge of one protocol (``purpose``) of the run; in messages, proofs are hex."""

    def __init__(self, secret: bytes, purpose: str) -> None:
        self._secret = secret
        self._purpose = purpose

    def __repr__(self) -> str:
        return f"Challenge(..., {self._purpose!r})"

    def of_client(self, server_nonce: str, client_nonce: str) -> str:
        """What a client answers to a server's nonce."""
        return mac(self._secret, self._purpose, "client", server_nonce, client_nonce).hex()

    def of_server(self, server_nonce: str, client_nonce: str) -> str:
        """What the server then answers."""
        return mac(self._secret, self._purpose, "server", server_nonce, client_nonce).hex()
