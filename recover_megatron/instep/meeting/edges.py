"""Finds workers that this worker cannot reach, and counts the epochs in which the run makes no progress.

    an epoch ends --by a death------> the next epoch
                  '--without a death--> probe the workers to which connections of this worker failed
                                        after the second epoch at one decision: also probe all workers that this worker
                                            may need
                                        after ``TRUSTED`` repeated epochs: a failed connection counts like a failed
                                            probe
                                        after ``MOST`` repeated epochs: the run ends, and reports why

If a worker cannot reach another, no plan gives places to both workers (`plan`).  Unreachable workers are probed
again before every later rendezvous.
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
"""Seconds for which a worker that was unreachable before is probed again."""
TRUSTED, MOST = 4, 10
"""Numbers of repeated epochs (``Edges.tries``).  After ``TRUSTED`` repeated epochs a worker to which a connection
failed counts as unreachable without a probe.  After ``MOST`` repeated epochs the run ends."""
ALL = 256
"""Greatest number of workers of a run in which each worker probes all others; in larger runs a worker probes only its
column, its replica and the spares."""
_PAUSE, _LONGEST_PAUSE = 0.1, 3.0

Probe = Callable[[Mapping[int, str], float, Callable[[], Collection[int]]], set[int]]


@dataclass(eq=False)
class Edges:
    """Record of the workers that one worker cannot reach.  Not thread-safe: used by one thread at a time."""

    _me: int
    probe: Probe = unreached
    pause: Callable[[float], None] = time.sleep
    _known: dict[int, JoinStatus] = field(default_factory=dict, init=False)
    """Statuses with which the members joined the last epoch."""
    _unreached: set[int] = field(default_factory=set, init=False)
    _failed: set[int] = field(default_factory=set, init=False)
    """Workers to which a connection broke during the present decision, although neither side had closed it."""
    _suspects: set[int] = field(default_factory=set, init=False)
    """Workers to probe before the next epoch."""
    _at: int = field(default=0, init=False)
    _last: Any = field(default=None, init=False)
    tries: int = field(default=0, init=False)
    """Number of repeated epochs: each began at the same decision and with the same members as the epoch before."""

    def noticed(self, worker: int) -> None:
        """Record that a connection to ``worker`` broke, although ``worker`` had not closed it."""
        self._failed.add(worker)
        self._suspects.add(worker)

    def suspect(self, workers: Collection[int]) -> None:
        """Record that a connection between some of ``workers`` broke, although all of them seem to live."""
        self._suspects |= set(workers) - {self._me}

    def look(self, at: int, members: Callable[[], frozenset[int]]) -> tuple[int, ...]:
        """Probe suspected workers, and return the unreachable ones; call it before joining an epoch at decision ``at``.

        ``members``: function that returns the present members of the run.  Takes little more than ``REACH_SECONDS`` at
        most.
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
            self.pause(min(_PAUSE * 2**self.tries, _LONGEST_PAUSE))  # the cause is unknown, and may disappear
        self._unreached = found & members()
        return tuple(sorted(self._unreached))

    def record(self, decision: Decision, statuses: Mapping[int, JoinStatus], committed: int) -> None:
        state = [(worker, s.replica, s.position, s.ready, s.version) for worker, s in sorted(statuses.items())]
        now = decision.at, committed, state, decision.grid
        self.tries = self.tries + 1 if now == self._last else 0
        if decision.at != self._at:
            self._failed = set()
        self._known, self._at, self._last = dict(statuses), decision.at, now

    def _needed(self) -> set[int]:
        own = self._known.get(self._me)
        if len(self._known) <= ALL or own is None:
            return set(self._known) - {self._me}
        return {
            worker
            for worker, status in self._known.items()
            if status.position == own.position or None in (status.replica, own.replica) or status.replica == own.replica
        } - {self._me}

    def _try(self, workers: set[int], seconds: float, members: Callable[[], frozenset[int]]) -> set[int]:
        addresses = {
            worker: self._known[worker].peer_store for worker in sorted(workers) if self._known[worker].peer_store
        }
        if not addresses:
            return set()
        return self.probe(addresses, seconds, lambda: set(addresses) - members())


def describe(decision: Decision, statuses: Mapping[int, JoinStatus]) -> list[str]:
    """Return log lines about pairs of workers that cannot connect, and about replicas that therefore have no place;
    [] if all workers can connect."""
    if not decision.broken:
        return []

    def name(worker: int) -> str:
        status = statuses.get(worker)
        return f"worker {worker}" + (f" on {status.node} ({status.peer_store.split(' ')[0]})" if status else "")

    pairs = sorted(decision.broken)
    lines = [
        "workers that are alive but cannot connect to each other: "
        + "; ".join(f"{name(one)} and {name(other)}" for one, other in pairs[:4])
        + (f"; and {len(pairs) - 4} more pairs" if len(pairs) > 4 else "")
    ]
    for replica, reasons in decision.left_out.items():
        because = ", ".join(f"{one}-{other}" for one, other in reasons[:4])
        lines.append(f"replica {replica} is left out (workers {because} cannot connect); its workers wait as spares")
    return lines


def news(
    before: Decision | None, decision: Decision, statuses: Mapping[int, JoinStatus], tries: int, reason: str
) -> list[str]:
    """Return log lines about a new epoch that no death has caused; ``reason``: why the previous epoch ended."""
    if before is None:
        return []
    if before.broken != decision.broken or decision.left_out:
        now_reachable = {worker for pair in before.broken for worker in pair} <= set(statuses)
        return describe(decision, statuses) or ["all workers can connect to each other again"] * now_reachable
    if READY in reason or decision.fresh:
        return []  # the training itself logs which workers take a place
    if ADMITTED in reason:
        return [f"{reason}: it waits for a place"]
    same = set(before.workers) == set(decision.workers)
    same &= {*before.spares} <= {*decision.workers, *decision.spares}
    if NEW_COORDINATOR in reason:
        return [f"{NEW_COORDINATOR}{'; no worker was lost' * same}"]
    if same and decision.version is None:
        again = f" (attempt {tries + 1} at the same decision)" if tries else ""
        return [f"no worker was lost, but a new epoch begins{again}: {reason}"]
    return []


def why_out(decision: Decision, replica: int) -> str:
    """Return the reason why a complete replica has no place; empty unless broken edges are the reason."""
    pairs = ", ".join(f"{one}-{other}" for one, other in decision.left_out.get(replica, ())[:4])
    return f"its replica was left out: workers {pairs} cannot connect to each other" if pairs else ""


def explanation(decision: Decision, me: int, replica: int | None, before: str) -> str:
    """Return why worker ``me`` has no place, if unreachable workers are the reason; empty if ``me`` has a place.

    ``replica``: the replica of ``me`` until now.  ``before``: last explanation, returned if no other reason is found.
    """
    if decision.place(me) is not None:
        return ""
    if replica is not None and (reason := why_out(decision, replica)):
        return reason
    others = [one if other == me else other for one, other in sorted(decision.broken) if me in (one, other)]
    if not others:
        return before
    return f"it cannot connect to workers {', '.join(map(str, others[:8]))}, although they are alive"
