"""The workers that this one can reach, and how often the run has come to one decision without getting any further.

    an epoch ends --by a death--> the next one
                  '--without----> with whom this worker's own connections failed is tried
                                  the second of one decision has ended: everybody whom it may need is tried
                                  ``TRUSTED``: with whom connections failed counts as if trying had shown it
                                  ``MOST``: the run ends, and says why

The plan avoids what workers say that they cannot reach (`plan`); it is tried again before every later rendezvous.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from recover_megatron.collectives.peers import REACH_SECONDS, unreached
from recover_megatron.instep.decision import Decision, JoinStatus
from recover_megatron.instep.meeting.losses import READY
from recover_megatron.membership.records import ADMITTED, NEW_COORDINATOR

AGAIN_SECONDS = 1.0
"""How long those are tried that could not be reached before."""
TRUSTED, MOST = 4, 10
"""Epochs at one decision: after the first number of them failed connections are believed without trying again; after
the second the run ends."""
ALL = 256
"""In a run of at most so many workers everybody is tried, else those of the own column and replica and the spares."""
_PAUSE, _LONGEST_PAUSE = 0.1, 3.0

Probe = Callable[[Mapping[int, str], float, Callable[[], Collection[int]]], set[int]]


@dataclass(eq=False)
class Edges:
    """The workers that this one cannot reach.  Not thread-safe: a worker joins from one thread at a time."""

    _me: int
    probe: Probe = unreached
    pause: Callable[[float], None] = time.sleep
    _known: dict[int, JoinStatus] = field(default_factory=dict, init=False)
    """What everybody joined the last epoch with."""
    _unreached: set[int] = field(default_factory=set, init=False)
    _failed: set[int] = field(default_factory=set, init=False)
    """With whom connections of this worker's broke at the present decision, though nobody hung up."""
    _suspects: set[int] = field(default_factory=set, init=False)
    """Those that are tried before the next epoch."""
    _at: int = field(default=0, init=False)
    _last: Any = field(default=None, init=False)
    tries: int = field(default=0, init=False)
    """How many epochs were made for the present decision after the first one, with the same members."""

    def noticed(self, worker: int) -> None:
        """A connection to this one broke, and it did not hang up."""
        self._failed.add(worker)
        self._suspects.add(worker)

    def suspect(self, workers: Collection[int]) -> None:
        """Some connection among these broke, and nobody of them is known to have died."""
        self._suspects |= set(workers) - {self._me}

    def look(self, at: int, members: Callable[[], frozenset[int]]) -> tuple[int, ...]:
        """Before an epoch is joined at decision ``at``: whom this worker cannot reach.

        ``members``: whom the run counts on, at any moment.  Takes at most ``REACH_SECONDS`` and a bit.
        """
        alike = at == self._at and self.tries > 0 and set(self._known) == set(members())
        tried = self._suspects | (self._needed() if alike else set())
        tried &= set(self._known) & members()
        again = self._unreached & members() - tried
        self._suspects = set()
        found = self._try(tried, REACH_SECONDS, members) | self._try(again, AGAIN_SECONDS, members)
        if alike and self.tries >= TRUSTED:
            found |= self._failed
        elif alike and not found:
            self.pause(min(_PAUSE * 2**self.tries, _LONGEST_PAUSE))  # whatever it is, it may pass
        self._unreached = found & members()
        return tuple(sorted(self._unreached))

    def told(self, decision: Decision, statuses: Mapping[int, JoinStatus], committed: int) -> None:
        state = [(worker, s.replica, s.position, s.ready, s.version) for worker, s in sorted(statuses.items())]
        now = decision.at, committed, state, decision.grid
        self.tries = self.tries + 1 if now == self._last else 0
        if decision.at != self._at:
            self._failed = set()
        self._known, self._at, self._last = dict(statuses), decision.at, now

    def _needed(self) -> set[int]:
        mine = self._known.get(self._me)
        if len(self._known) <= ALL or mine is None:
            return set(self._known) - {self._me}
        return {
            worker
            for worker, status in self._known.items()
            if status.position == mine.position
            or None in (status.replica, mine.replica)
            or status.replica == mine.replica
        } - {self._me}

    def _try(self, workers: set[int], seconds: float, members: Callable[[], frozenset[int]]) -> set[int]:
        addresses = {
            worker: self._known[worker].peer_store for worker in sorted(workers) if self._known[worker].peer_store
        }
        if not addresses:
            return set()
        return self.probe(addresses, seconds, lambda: set(addresses) - members())


def describe(decision: Decision, statuses: Mapping[int, JoinStatus]) -> list[str]:
    """What a plan does about broken edges, for people; nothing where none is broken."""
    if not decision.broken:
        return []

    def name(worker: int) -> str:
        status = statuses.get(worker)
        return f"worker {worker}" + (f" on {status.node} ({status.peer_store.split(' ')[0]})" if status else "")

    pairs = sorted(decision.broken)
    lines = [
        "cannot talk to each other although both are alive: "
        + "; ".join(f"{name(one)} and {name(other)}" for one, other in pairs[:4])
        + (f"; and {len(pairs) - 4} more pairs" if len(pairs) > 4 else "")
    ]
    for replica, reasons in decision.put_out.items():
        because = ", ".join(f"{one}-{other}" for one, other in reasons[:4])
        lines.append(f"replica {replica} is put out for it (workers {because}); its workers wait as spares")
    return lines


def news(
    before: Decision | None, decision: Decision, statuses: Mapping[int, JoinStatus], tries: int, reason: str
) -> list[str]:
    """What to say on the console of an epoch that nobody's death has made; ``reason``: why the last one ended."""
    if before is None:
        return []
    if before.broken != decision.broken or decision.put_out:
        mended = {worker for pair in before.broken for worker in pair} <= set(statuses)
        return describe(decision, statuses) or ["all workers can talk to each other again"] * mended
    if READY in reason or decision.fresh:
        return []  # who comes back is told of by the training
    if ADMITTED in reason:
        return [f"{reason}: it waits for a place"]
    same = set(before.workers) == set(decision.workers)
    same &= {*before.spares} <= {*decision.workers, *decision.spares}
    if NEW_COORDINATOR in reason:
        return [f"{NEW_COORDINATOR}{'; nobody was lost' * same}"]
    if same and decision.version is None:
        again = f" (for the {tries + 1}. time at one point)" if tries else ""
        return [f"nobody was lost, but all meet again{again}: {reason}"]
    return []


def why_out(decision: Decision, replica: int) -> str:
    """Why a replica that was whole has no place; empty: not because of broken edges."""
    pairs = ", ".join(f"{one}-{other}" for one, other in decision.put_out.get(replica, ())[:4])
    return f"its replica was put out: workers {pairs} cannot talk to each other" if pairs else ""


def explanation(decision: Decision, me: int, replica: int | None, before: str) -> str:
    """For people, of a worker alone: which broken edges have cost it its place; empty: none.

    ``replica``: in which it had one until now; ``before``: what was said of it by now.
    """
    if decision.place(me) is not None:
        return ""
    if replica is not None and (reason := why_out(decision, replica)):
        return reason
    others = [one if other == me else other for one, other in sorted(decision.broken) if me in (one, other)]
    if not others:
        return before
    return f"it cannot talk to workers {', '.join(map(str, others[:8]))}, although they are alive"
