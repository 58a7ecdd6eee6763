"""A worker's way into the run that its launcher started: secret, id and, by default, addresses come by variables."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from recover_megatron.arguments import parse_addresses
from recover_megatron.membership.auth import find_secret
from recover_megatron.membership.client import Address
from recover_megatron.membership.records import Settings, WorkerId
from recover_megatron.membership.session import RevokeCallback, Session
from recover_megatron.network.system import use_all_descriptors
from recover_megatron.variables import COORDINATOR_VARIABLE, JOIN_VARIABLE, NODE_VARIABLE, WORKER_ID_VARIABLE


def connect(
    settings: Settings | None = None,
    on_revoke: RevokeCallback | None = None,
    environ: Mapping[str, str] = os.environ,
    addresses: Sequence[Address] | None = None,
    exit_when_out: float | None = None,
) -> Session:
    """Open the session of this worker (``Session.connect``), as recover-run's environment variables say.

    And raise this process's limit of open files (``system.use_all_descriptors``).

    ``addresses``: the candidates, instead of the environment's. The launcher is a node agent with its own candidates
    only: with others this worker has none.

    Raises KeyError where the launcher gave no coordinator or no rank, ValueError for a malformed address, and
    SecretError without a usable secret.
    """
    use_all_descriptors()
    node_agent = environ.get(NODE_VARIABLE)
    if addresses is None:
        addresses = _launchers_addresses(environ[COORDINATOR_VARIABLE])
    elif COORDINATOR_VARIABLE not in environ or list(addresses) != _launchers_addresses(environ[COORDINATOR_VARIABLE]):
        node_agent = None
    return Session.connect(
        addresses,
        worker_id(environ),
        find_secret(environ),
        settings,
        node_agent=node_agent,
        on_revoke=on_revoke,
        exit_when_out=exit_when_out,
        newcomer=is_newcomer(environ),
    )


def worker_id(environ: Mapping[str, str] = os.environ) -> WorkerId:
    """Which worker this process is. Raises KeyError where the launcher gave neither an id nor a rank."""
    return WorkerId(int(environ.get(WORKER_ID_VARIABLE) or environ["RANK"]))


def is_newcomer(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this worker was not launched with the run."""
    return environ.get(JOIN_VARIABLE) == "1"


def _launchers_addresses(text: str) -> list[Address]:
    try:
        return parse_addresses(text)
    except ValueError as error:
        raise ValueError(f"{COORDINATOR_VARIABLE}={text}: {error}") from None
