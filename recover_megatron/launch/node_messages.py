"""What launchers believe of what is in the store (``Seal``), and what they are told of each other (``NodeEvents``)."""

from __future__ import annotations

import json
from typing import Any, Protocol

from recover_megatron.launch.plan import Candidates
from recover_megatron.launch.states import ExitOutcome
from recover_megatron.membership.wire import Secret
from recover_megatron.network import connection


class NodeEvents(Protocol):
    """What the threads that talk to the other launchers tell this one.  The event loop calls it in the main thread."""

    def accepted(self, run_id: str) -> None:
        """This node takes part in the run (other nodes than 0)."""

    def coordinators(self, candidates: Candidates) -> None:
        """All candidate coordinators are known."""

    def all_joined(self) -> None:
        """Every node takes part (node 0)."""

    def refused(self, reason: str) -> None:
        """This node may not take part."""

    def note(self, text: str) -> None:
        """Something the user should read."""

    def failed(self, reason: str, code: int) -> None:
        """The launch cannot go on here: the reason, and the exit code."""

    def store_failed(self, reason: str) -> None:
        """The store is not served (node 0)."""

    def store_lost(self, reason: str) -> None:
        """The store of node 0 is gone, or not reached."""

    def store_back(self) -> None:
        """It is reached again."""

    def report(self, node_rank: int, outcomes: list[ExitOutcome]) -> None:
        """The workers of a node have ended so (node 0)."""

    def node_lost(self, node_rank: int) -> None:
        """The launcher of a node is not heard of any more, and has not reported (node 0)."""

    def node_back(self, node_rank: int) -> None:
        """It is heard of again (node 0)."""

    def delivered(self) -> None:
        """Our report is in the store, or the store is gone (other nodes)."""


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
        """Whether values are proved at all."""
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
