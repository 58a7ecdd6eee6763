"""A worker's way into the run that its launcher started: addresses, secret and worker id from the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping

from recover_megatron.membership.auth import find_secret
from recover_megatron.membership.client import Address
from recover_megatron.membership.records import Settings
from recover_megatron.membership.session import RevokeCallback, Session

COORDINATOR_VARIABLE = "RECOVER_COORDINATOR"
"""``host:port[,host:port ...]``: the candidate coordinators, in the order in which all members turn to them."""
NODE_VARIABLE = "RECOVER_NODE"
"""The name under which the launcher of this worker's node is a witness; not set: there is none."""


def parse_addresses(text: str) -> list[Address]:
    """The candidates of ``host:port,host:port``; ValueError for anything else."""
    addresses = []
    for item in text.split(","):
        host, separator, port = item.strip().rpartition(":")
        if not separator or not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"{COORDINATOR_VARIABLE}={text}: {item!r} is not HOST:PORT")
        addresses.append((host, int(port)))
    return addresses


def connect(
    settings: Settings | None = None,
    on_revoke: RevokeCallback | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Session:
    """Open the session of this worker (``Session.connect``), as recover-run's environment variables say.

    Raises KeyError where the launcher gave no coordinator or no rank, ValueError for a malformed address, and
    SecretError without a usable secret.
    """
    return Session.connect(
        parse_addresses(environ[COORDINATOR_VARIABLE]),
        int(environ["RANK"]),
        find_secret(environ),
        settings,
        witness=environ.get(NODE_VARIABLE),
        on_revoke=on_revoke,
    )
