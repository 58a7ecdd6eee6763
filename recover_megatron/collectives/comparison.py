"""Comparison of workers' flags and programs; a worker that differs from the run is refused.

Each worker joins with two digests.  It publishes the digested values in its peer store, where other workers can read
them:

    given   flags, and versions of the protocol between workers.  A worker whose digest differs from the run's digest is
            refused.  The digest suffices for this, so the other workers need not read more of that worker's status.
    code    source files and packages (`program`).  Digests of equal programs may differ, because workers may have
            loaded different modules.  So a worker whose digest differs reads the values of a worker of the run, once,
            before it gets a place.  It is refused if a module that both workers have loaded differs.

A refused worker without a place exits (a newcomer with exit code 2), and the run continues without it.  If a worker
with a place is refused, the run ends.
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
"""Time limit in seconds to read another worker's values; a refused worker has twice this time to report differences."""
MOST_ASKED = 3
"""Maximum number of workers from which a worker tries to read the values of the run's program."""


@dataclass(frozen=True)
class ComparedStatus:
    """Parts of a worker's status that the comparison uses; ``given`` and ``code``: digests, "" if missing."""

    given: str = ""
    code: str = ""
    placed: bool = False
    """True if the worker has a place in the grid."""
    holds: bool = False
    """True if the worker has a state of the training."""
    peer_store: str = ""

    @classmethod
    def of(cls, status: Any, placed: str, holds: str, peer_store: str) -> ComparedStatus:
        """Read ``status``; the other arguments are the names of the fields to read.

        Never raises, because a worker with another version of the protocol may have sent the status.
        """
        fields = status if isinstance(status, dict) else {}
        given, code, address = (str(fields.get(name, "")) for name in (GIVEN, CODE, peer_store))
        has_place, has_state = (fields.get(name) is not None and fields[name] is not False for name in (placed, holds))
        return cls(given, code, has_place, has_state, address)


@dataclass(frozen=True)
class OddOnes:
    """Workers whose digest differs from the run's digest.

    ``model``: a worker whose digest is the run's digest; -1 if no worker sent a digest.
    """

    workers: frozenset[int] = frozenset()
    model: int = -1


def odd_ones(compared: Mapping[int, ComparedStatus], what: str = "given") -> OddOnes:
    """Return the workers whose digest ``what`` ("given" or "code") differs from the run's digest.

    The run's digest is the most frequent digest among the workers with a place.  If no worker has a place, only workers
    with a state count; if no worker has a state, all workers count.  A worker without a digest is not compared.
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
    """Flags (``given``) and program (``code``) of this worker, which it publishes in its peer store.

    An empty mapping is not compared.
    """

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
        """``called``: name for ``given`` in messages.  ``lets_in``: flag that turns off the comparison of ``code``."""
        self._given, self._code, self._secret = given, code, secret
        self._called, self._lets_in = called, lets_in
        self.given = script_flags.digest(given) if given else ""
        self.code = script_flags.digest(code) if code else ""
        self._compared = not code
        if peer_store is not None:
            peer_store.put(GIVEN, json.dumps(given))
            peer_store.put(CODE, json.dumps(code))

    def different(self, me: int, compared: Mapping[int, ComparedStatus], odd: OddOnes) -> str:
        """Return the reason why this worker, ``me``, is refused; "" if it is accepted.

        ``odd``: result of ``odd_ones(compared)``.
        """
        if me in odd.workers:
            other = self._ask(compared[odd.model].peer_store, GIVEN)
            found = script_flags.listed(script_flags.differences(self._given, other or self._given))
            found = found or "the differences are unknown, because that worker did not send its values"
            return f"was started with other {self._called} than worker {odd.model} of the run: {found}"
        if code := self._other_program(me, compared):
            return f"runs {code}; start it with the files of the run, or restart the run ({self._lets_in} allows this)"
        return ""

    def _other_program(self, me: int, compared: Mapping[int, ComparedStatus]) -> str:
        """Return how this worker's program differs from the run's program; "" if it does not differ.

        The comparison is made only in the first call for which some worker has sent a digest; all other calls return
        "".  If no worker with the run's digest answers in time, this worker is accepted, and a warning is logged.
        """
        odd = odd_ones(compared, "code")
        if self._compared or odd.model < 0:
            return ""
        self._compared = True
        if me not in odd.workers:
            return ""
        alike = [worker for worker in sorted(compared) if compared[worker].code == compared[odd.model].code]
        begin = me % len(alike)  # if many workers differ, this spreads their requests over the workers of the run
        for worker in [*alike[begin:], *alike[:begin]][:MOST_ASKED]:
            other = self._ask(compared[worker].peer_store, CODE)
            if other is not None:
                refuses, warns = program.differences(self._code, other)
                if warns:
                    log.warning(f"workers {me} and {worker} have different packages: {script_flags.listed(warns)}")
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
