"""Compares what workers were started with: their flags and the like, and the program that they run.

Each worker joins with two digests.  What they stand for is on its peer store, for those whose own differ:

    given   flags, versions of the protocol between workers: who has others is refused, and the others know it at once,
            by the digest alone, before anything else of its status is read
    code    sources and packages (`program`): workers may have loaded different modules, so a worker with another digest
            asks a worker of the run, once, before it takes a part, and is refused where it differs in what both have

Only the one that differs ends: a newcomer by exit code 2, and the run goes on without it.
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
"""Time limit for the answer of another worker, and for the word of a worker that differs."""
MOST_ASKED = 3


@dataclass(frozen=True)
class Told:
    """The compared parts of a worker's status, as it arrived."""

    given: str = ""
    code: str = ""
    placed: bool = False
    """The worker has a part in the training."""
    holds: bool = False
    """The worker has a state of the training."""
    peer_store: str = ""

    @classmethod
    def of(cls, status: Any, placed: str, holds: str, peer_store: str) -> Told:
        """These are names of fields.  Raises nothing: a worker of another version may have sent it."""
        its = status if isinstance(status, dict) else {}
        given, code, address = (str(its.get(name, "")) for name in (GIVEN, CODE, peer_store))
        has_place, has_state = (its.get(name) is not None and its[name] is not False for name in (placed, holds))
        return cls(given, code, has_place, has_state, address)


@dataclass(frozen=True)
class OddOnes:
    """``workers``: those that differ from the run; ``model``: a worker that does not; -1: nobody told anything."""

    workers: frozenset[int] = frozenset()
    model: int = -1


def odd_ones(told: Mapping[int, Told], what: str = "given") -> OddOnes:
    """The workers that were started with something else than the run; ``what``: "given" or "code".

    The run's is what most of those have that stand in a place; of those that hold a state, where nobody has a place;
    else of all. A worker that tells none is none.
    """
    digests = {worker: digest for worker, its in told.items() if (digest := getattr(its, what))}
    placed = [worker for worker in digests if told[worker].placed]
    holding = [worker for worker in digests if told[worker].holds]
    asked = sorted(placed or holding or digests)
    if not asked:
        return OddOnes()
    counts = Counter(digests[worker] for worker in asked)
    model = min(asked, key=lambda worker: (-counts[digests[worker]], worker))
    return OddOnes(frozenset(worker for worker in digests if digests[worker] != digests[model]), model)


class OwnDescription:
    """This worker's flags and program, published on its peer store; an empty one is not compared."""

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
        """``called``: what ``given`` is for people; ``lets_in``: what they write so that ``code`` is not compared."""
        self._given, self._code, self._secret = given, code, secret
        self._called, self._lets_in = called, lets_in
        self.given = script_flags.digest(given) if given else ""
        self.code = script_flags.digest(code) if code else ""
        self._compared = not code
        if peer_store is not None:
            peer_store.put(GIVEN, json.dumps(given))
            peer_store.put(CODE, json.dumps(code))

    def different(self, me: int, told: Mapping[int, Told], odd: OddOnes) -> str:
        """Say why this worker has no part in the run; empty: it has one.  ``odd``: the ``odd_ones`` of ``told``."""
        if me in odd.workers:
            theirs = self._ask(told[odd.model].peer_store, GIVEN)
            found = script_flags.listed(script_flags.differences(self._given, theirs or self._given))
            found = found or "which ones could not be found out"
            return f"was started with other {self._called} than worker {odd.model}, which has the run's: {found}"
        if code := self._other_program(me, told):
            return f"runs {code}; start it with the files of the run, or the run anew ({self._lets_in}: let it in)"
        return ""

    def _other_program(self, me: int, told: Mapping[int, Told]) -> str:
        """Looks until there are workers to compare with; what it finds then stands.

        A program that nobody shows in time is taken as it is: the workers that have it cannot be reached.
        """
        odd = odd_ones(told, "code")
        if self._compared or odd.model < 0:
            return ""
        self._compared = True
        if me not in odd.workers:
            return ""
        alike = [worker for worker in sorted(told) if told[worker].code == told[odd.model].code]
        begin = me % len(alike)  # where many differ they ask different workers
        for worker in [*alike[begin:], *alike[:begin]][:MOST_ASKED]:
            theirs = self._ask(told[worker].peer_store, CODE)
            if theirs is not None:
                refuses, warns = program.differences(self._code, theirs)
                if warns:
                    log.warning(f"worker {me} has other packages than worker {worker}: {script_flags.listed(warns)}")
                return f"another program than worker {worker}: {script_flags.listed(refuses)}" if refuses else ""
        log.warning(f"worker {me} may run another program than worker {odd.model}, which did not tell its own in time")
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
