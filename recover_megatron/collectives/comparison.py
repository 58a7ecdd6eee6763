"""Comparison that refuses workers which were started with other flags, or run another program, than the run.

Each worker joins with two digests.  The values behind the digests are on the worker's peer store, where a worker with
another digest reads them:

    given   flags and versions of the protocol between workers.  A worker with another digest is refused; the other
            workers see this from the digest alone, before they read anything else of that worker's status.
    code    sources and packages (`program`).  Workers may have loaded different modules, so digests may differ though
            the program is the same: a worker with another digest reads the values of a worker of the run, once, before
            it takes a place, and is refused if a module differs that both have loaded.

Only the worker that differs exits (a newcomer with exit code 2), and the run continues without it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from recover_megatron import program, script_flags
from recover_megatron.collectives.epoch import PeerLost
from recover_megatron.collectives.peers import PeerStoreClient
from recover_megatron.logger import get_logger
from recover_megatron.network.peer_store import PeerStoreServer

log = get_logger(__name__)

GIVEN, CODE = "flags", "code"
ASKED_SECONDS = 5.0
"""Time limit in seconds for another worker's answer, and for a refused worker to report why it differs."""
MOST_ASKED = 3
"""Maximum number of workers that a worker asks for the values of the run's program."""


@dataclass(frozen=True)
class ComparedStatus:
    """Parts of another worker's status that the comparison uses, as received."""

    given: str = ""
    code: str = ""
    placed: bool = False
    """True if the worker has a place in the grid."""
    holds: bool = False
    """True if the worker has a state of the training."""
    peer_store: str = ""

    @classmethod
    def of(cls, status: Any, placed: str, holds: str, peer_store: str) -> ComparedStatus:
        """Read ``status``; the other arguments are names of fields in it.

        Never raises, since a worker of another version may have sent the status.
        """
        fields = status if isinstance(status, dict) else {}
        given, code, address = (str(fields.get(name, "")) for name in (GIVEN, CODE, peer_store))
        has_place, has_state = (fields.get(name) is not None and fields[name] is not False for name in (placed, holds))
        return cls(given, code, has_place, has_state, address)


@dataclass(frozen=True)
class OddOnes:
    """Workers that differ from the run; ``model``: a worker that does not differ, -1 if no worker sent a digest."""

    workers: frozenset[int] = frozenset()
    model: int = -1


def odd_ones(compared: Mapping[int, ComparedStatus], what: str = "given") -> OddOnes:
    """Return the workers whose digest ``what`` ("given" or "code") differs from the run's digest.

    The run's digest is the most frequent digest of the workers with a place; if no worker has a place, of the workers
    with a state; if no worker has a state, of all.  A worker without a digest is not compared.
    """
    digests = {worker: digest for worker, parts in compared.items() if (digest := getattr(parts, what))}
    placed = [worker for worker in digests if compared[worker].placed]
    holding = [worker for worker in digests if compared[worker].holds]
    asked = sorted(placed or holding or digests)
    if not asked:
        return OddOnes()
    counts = Counter(digests[worker] for worker in asked)
    model = min(asked, key=lambda worker: (-counts[digests[worker]], worker))
    return OddOnes(frozenset(worker for worker in digests if digests[worker] != digests[model]), model)


class OwnDescription:
    """Flags and program of this worker, published on its peer store.  If a mapping is empty, it is not compared."""

    def __init__(
        self,
        given: Mapping[str, str],
        code: Mapping[str, str],
        peer_store: PeerStoreServer | None,
        secret: bytes,
        *,
        called: str = "flags",
        lets_in: str = f"--recover-may-differ {program.FLAG}",
    ) -> None:
        """``called``: name of ``given`` in messages.  ``lets_in``: flag that turns off the comparison of ``code``."""
        self._given, self._code, self._secret = given, code, secret
        self._called, self._lets_in = called, lets_in
        self.given = script_flags.digest(given) if given else ""
        self.code = script_flags.digest(code) if code else ""
        self._compared = not code
        if peer_store is not None:
            peer_store.put(GIVEN, json.dumps(given))
            peer_store.put(CODE, json.dumps(code))

    def different(self, me: int, compared: Mapping[int, ComparedStatus], odd: OddOnes) -> str:
        """Return why this worker is refused, "" if it is accepted.  ``odd``: result of ``odd_ones(compared)``."""
        if me in odd.workers:
            other = self._ask(compared[odd.model].peer_store, GIVEN)
            found = script_flags.listed(script_flags.differences(self._given, other or self._given))
            found = found or "the differences could not be read from that worker"
            return f"was started with other {self._called} than the run's worker {odd.model}: {found}"
        if code := self._other_program(me, compared):
            return f"runs {code}; start it with the files of the run, or restart the run ({self._lets_in} accepts it)"
        return ""

    def _other_program(self, me: int, compared: Mapping[int, ComparedStatus]) -> str:
        """Return how this worker's program differs from the run's program; "" if it does not differ.

        Compares only once: at the first call for which a worker has sent a digest; later calls return "".  If no worker
        with the run's program answers in time, this worker's program is accepted, with a warning.
        """
        odd = odd_ones(compared, "code")
        if self._compared or odd.model < 0:
            return ""
        self._compared = True
        if me not in odd.workers:
            return ""
        alike = [worker for worker in sorted(compared) if compared[worker].code == compared[odd.model].code]
        begin = me % len(alike)  # if many workers differ, they ask different workers
        for worker in [*alike[begin:], *alike[:begin]][:MOST_ASKED]:
            other = self._ask(compared[worker].peer_store, CODE)
            if other is not None:
                refuses, warns = program.differences(self._code, other)
                if warns:
                    log.warning(f"worker {me} has other packages than worker {worker}: {script_flags.listed(warns)}")
                return f"another program than worker {worker}: {script_flags.listed(refuses)}" if refuses else ""
        log.warning(f"worker {me} may run another program than worker {odd.model}, which did not answer in time")
        return ""

    def _ask(self, address: str, what: str) -> dict[str, str] | None:
        store = PeerStoreClient(address, self._secret)
        try:
            with suppress(PeerLost, dist.DistStoreError, ValueError, AttributeError, RuntimeError):
                store.wait([what], timedelta(seconds=ASKED_SECONDS))
                return {str(name): str(value) for name, value in json.loads(store.get(what)).items()}
            return None
        finally:
            store.close()
