"""The records that coordinator and members exchange and keep, the settings of the protocol, and its errors.

The errors are what can end a wait on the control plane other than its result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NewType, Self, cast

Json = Any
"""A value that ``json.dumps`` takes: what statuses and plans are made of."""

WorkerId = NewType("WorkerId", int)
"""Which worker of the run, for good; no session, rank or slot."""
Workers = frozenset[WorkerId]

Runs = list[list[int]]
"""A set of worker ids on the wire: sorted, inclusive runs ``[[first, last], ...]`` (4,000 workers: 10 bytes)."""

MAX_WORKERS = 1 << 20
"""Worker ids are below this; it bounds what a set of runs can expand to."""

FIRST_JOINED = 1 << 10
"""Candidates that joined after the launch have numbers from here on: those of their event logs' names."""

JOINED_FROM = 1 << 19
"""Ids of workers from here on are those of launchers that joined the run."""

MOST_ADDED = 3
"""So many candidates that joined after the launch are told to the members; another one when one of them is lost."""


def to_runs(workers: Iterable[int]) -> Runs:
    runs: Runs = []
    for worker in sorted(workers):
        if runs and worker == runs[-1][1] + 1:
            runs[-1][1] = worker
        else:
            runs.append([worker, worker])
    return runs


def ranges(numbers: Iterable[int]) -> str:
    """For people: "0-3, 7" for 0, 1, 2, 3, 7."""
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in to_runs(numbers))


def cut_middle(text: str, limit: int) -> str:
    """At most ``limit`` characters of ``text``: its beginning and its end, which say most of a traceback."""
    if len(text) <= limit:
        return text
    mark = f"\n[... {len(text) - limit} or more characters cut ...]\n"
    head = (limit - len(mark)) // 2
    return text[:head] + mark + text[len(text) - (limit - len(mark) - head) :]


def from_runs(runs: Runs) -> Workers:
    """Unpack ``to_runs``; the runs must have passed ``wire``'s check (bounded, ordered)."""
    return cast("Workers", frozenset(worker for first, last in runs for worker in range(first, last + 1)))


def first_workers(world: int) -> Workers:
    """The workers that a run of ``world`` workers is launched with."""
    return cast("Workers", frozenset(range(world)))


@dataclass(frozen=True)
class Settings:
    """Times in seconds. All processes of one run must use the same."""

    heartbeat_interval: float = 1.0
    heartbeat_timeout: float = 5.0
    """A host that is silent for this long is out."""
    hang_timeout: float = 60.0
    """A worker that others wait for is out after this long without a new progress mark."""
    stall_timeout: float = 600.0
    """What exists but does not move (a stopped process) is waited for so long where nothing can replace it, and where
    more than half of the replicas are late at once (see ``detect``)."""
    start_timeout: float = 3600.0
    """All workers must have come to the first rendezvous within this time: data sets are indexed, checkpoints read."""
    max_stuck_epochs: int = 3
    """So many epochs in a row that all workers wait in and none commits in end the run."""

    grace: float = 0.0
    """A replica for which all others have waited so long in a step is set aside (``lateness``); 0: none ever is."""
    min_replicas: int = 1
    """None is set aside where fewer would be left."""
    start_needs_all: bool = False
    """A worker of the launch that is lost before the first plan ends the run: it is no run yet."""

    @classmethod
    def of(cls, flags: object, **others: Any) -> Settings:
        """Those that are attributes of ``flags``, and ``others``; the defaults for the rest."""
        names = [each.name for each in fields(cls) if hasattr(flags, each.name)]
        return cls(**{name: getattr(flags, name) for name in names}, **others)

    @property
    def lost_timeout(self) -> float:
        """A member without a leading coordinator for this long gives up (``CoordinatorLost``)."""
        return 4 * self.heartbeat_timeout


ADMITTED = "is admitted"
"""After a newcomer's name: why an epoch is opened."""
NEW_COORDINATOR = "a new coordinator leads"
"""The same after the loss of one."""


@dataclass(frozen=True)
class Formed:
    """An epoch whose plan was fixed. Epoch 0 is the launch: all workers of the run, no plan."""

    epoch: int
    members: Workers
    term: int = 0

    def to_wire(self, prefix: str = "") -> dict[str, Any]:
        """The fields that name it in a message."""
        return {f"{prefix}epoch": self.epoch, f"{prefix}term": self.term, f"{prefix}members": to_runs(self.members)}

    @classmethod
    def from_wire(cls, message: Mapping[str, Any], prefix: str = "") -> Self:
        """What these fields of a checked message name."""
        members, term = message.get(f"{prefix}members", []), message.get(f"{prefix}term", 0)
        return cls(message[f"{prefix}epoch"], from_runs(members), term)


class Opened(Formed):
    """A rendezvous that was opened, whether or not its plan was fixed: ``members`` are those it waits for."""


@dataclass(frozen=True)
class Plan:
    """What an epoch decides, as every member of it receives it, byte for byte the same."""

    epoch: int
    members: Workers
    committed: int
    """The last committed iteration. A worker that had reported done(t) with t <= committed must apply step t."""
    data: Json
    """The planner's answer."""


@dataclass(frozen=True)
class PlanRequest:
    """Everything a planner may look at: a plan is a pure function of it."""

    epoch: int
    members: tuple[WorkerId, ...]
    """Sorted worker ids of the new epoch."""
    statuses: Mapping[WorkerId, Json]
    """What each member joined with."""
    previous: Json
    """The plan data of the last formed epoch; None before the first."""
    committed: int
    """The last committed iteration, including what this rendezvous decides."""
    lost: Mapping[WorkerId, Json] = field(default_factory=dict)
    """Of each member of the last epoch that has died or was put out: its last ``iteration`` and ``phase``."""
    drain: tuple[str, ...] = ()
    """Nodes that somebody is about to switch off, if the members can do without them."""
    aside: tuple[WorkerId, ...] = ()
    """Live workers that were late, and may come back."""


Planner = Callable[[PlanRequest], Json]


def members_only(request: PlanRequest) -> Json:
    """The planner of a run that plans for itself: its members, their statuses, who was lost; and where there are any,
    the nodes to ``drain`` and who is ``aside``."""
    plan = {
        "members": list(request.members),
        "statuses": {str(member): request.statuses[member] for member in request.members},
        "lost": {str(worker): last for worker, last in request.lost.items()},
    }
    more = {"drain": list(request.drain), "aside": list(request.aside)}
    return {**plan, **{name: its for name, its in more.items() if its}}


@dataclass
class Presentation:
    """What a member tells a coordinator it attaches to: all that it followed and all that it holds.

    The safety of a failover rests on it (``leadership``), so it only ever grows.
    """

    term: int = 0
    """The highest term followed; 0: none yet."""
    formed: Formed = field(default_factory=lambda: Formed(0, frozenset()))
    opened: Opened | None = None
    """The last rendezvous joined or acknowledged, if it is newer than ``formed``."""
    committed: int = 0
    dead: Workers = frozenset()
    """Workers known to have ended, as the coordinator told."""
    left: Workers = frozenset()
    """Workers that had finished and left in order."""
    aside: Workers = frozenset()
    """Live workers that the newest of ``formed`` and ``opened`` leaves out since they are late: they may come back."""

    @property
    def mentioned(self) -> Workers:
        opened = self.opened.members if self.opened is not None else frozenset()
        return self.formed.members | opened | self.dead | self.left | self.aside


_COUNTER_SHIFT = 32


def next_term(highest: int, salt: int) -> int:
    """A term above ``highest`` that no other coordinator has: the counter is one more, ``salt`` (32 bits) is random."""
    return ((highest >> _COUNTER_SHIFT) + 1 << _COUNTER_SHIFT) | salt


def presentation_to_wire(presentation: Presentation) -> dict[str, Any]:
    """The fields of an ``attach`` message that carry a presentation."""
    wire: dict[str, Any] = {
        "term": presentation.term,
        **presentation.formed.to_wire("formed_"),
        "committed": presentation.committed,
        "dead": to_runs(presentation.dead),
        "left": to_runs(presentation.left),
    }
    if presentation.aside:
        wire["aside"] = to_runs(presentation.aside)
    if presentation.opened is not None:
        wire |= presentation.opened.to_wire("opened_")
    return wire


def presentation_from_wire(message: Mapping[str, Any]) -> Presentation:
    """The presentation in a checked ``attach`` message."""
    return Presentation(
        term=message["term"],
        formed=Formed.from_wire(message, "formed_"),
        opened=Opened.from_wire(message, "opened_") if "opened_epoch" in message else None,
        committed=message["committed"],
        dead=from_runs(message["dead"]),
        left=from_runs(message["left"]),
        aside=from_runs(message.get("aside", [])),
    )


class Evidence:
    """All presentations a candidate has seen, merged: a lost coordinator's state is known from it. It only grows."""

    def __init__(self, world: int) -> None:
        self.formed = Formed(0, first_workers(world))
        self.opened: dict[tuple[int, int], Opened] = {}
        self.highest_term = 0
        self.highest_epoch = 0
        self.committed = 0
        self.dead: Workers = frozenset()
        self.left: Workers = frozenset()
        self.aside: Workers = frozenset()
        """The living workers that the newest known rendezvous has left out; not what the safety rests on."""
        self._aside_in = (0, 0)  # the term and epoch of that one

    def add(self, presentation: Presentation) -> None:
        self.highest_term = max(self.highest_term, presentation.term)
        self.committed = max(self.committed, presentation.committed)
        self.dead |= presentation.dead
        self.left |= presentation.left
        if presentation.formed.epoch > self.formed.epoch:
            self.formed = presentation.formed
        self.highest_epoch = max(self.highest_epoch, presentation.formed.epoch)
        if (opened := presentation.opened) is not None:
            self.opened[(opened.term, opened.epoch)] = opened
            self.highest_epoch = max(self.highest_epoch, opened.epoch)
        newest = opened or presentation.formed
        if (newest.term, newest.epoch) >= self._aside_in:
            same = (newest.term, newest.epoch) == self._aside_in
            self.aside = presentation.aside | (self.aside if same else frozenset())
            self._aside_in = newest.term, newest.epoch

    @property
    def unfinished(self) -> list[Opened]:
        """Rendezvous opened after the last epoch that is known to be formed: each may have been formed unseen."""
        return [self.opened[key] for key in sorted(self.opened) if self.opened[key].epoch > self.formed.epoch]

    @property
    def bases(self) -> list[Workers]:
        """The sets that a new coordinator needs a majority of."""
        return [self.formed.members, *(opened.members for opened in self.unfinished)]

    @property
    def target(self) -> Workers:
        """The members of the newest rendezvous: the run counts on them, and all others were put out for good."""
        unfinished = self.unfinished
        return unfinished[-1].members if unfinished else self.formed.members


EXIT_SAME_FAULT = 1
"""Exit code of a run that an exception ended which every worker would raise."""
EXIT_NO_REPLICA = 10
"""Exit code of a run that has too few live workers left for one replica."""
EXIT_LOST_MAJORITY = 11
"""Exit code of a worker or a run that no coordinator may continue."""
EXIT_STATE_LOST = 12
"""Exit code of a run whose live workers do not hold the whole state between them."""
EXIT_FENCED = 13
"""Exit code of a worker that finds itself out of the run; the run itself goes on without it."""


class MembershipError(Exception):
    """Base of everything this package raises for a state of the run (never for a programming error)."""


class EpochRevoked(MembershipError):
    """The epoch in which the operation was started is over; ``join`` the next one with your status."""

    def __init__(self, epoch: int, reason: str = "") -> None:
        super().__init__(f"epoch {epoch} was revoked" + (f": {reason}" if reason else ""))
        self.epoch = epoch
        self.reason = reason


class Fenced(MembershipError):
    """This worker is out of the run for good: end the process (exit code ``EXIT_FENCED``), the others go on."""


class CoordinatorLost(MembershipError):
    """No coordinator may continue the run for this worker; ``code`` is the exit code to end with.

    ``by``: the worker whose word ended the run for all (``give_up``, ``report_exception``); None: it was no worker's.
    ``told``: whether a coordinator has said so; else none was reached, and the run may go on, or have ended well.
    """

    def __init__(
        self, message: str, code: int = EXIT_LOST_MAJORITY, by: int | None = None, *, told: bool = False
    ) -> None:
        super().__init__(message)
        self.code = code
        self.by = by
        self.told = told


class SecretError(MembershipError):
    """The job's secret is missing, unreadable, too short, or readable by others; the message says what to do."""


class AuthenticationError(MembershipError):
    """The other side of a connection does not know the job's secret."""


class NoPlan(Exception):
    """Raised by a planner when the survivors cannot go on; the run stops with ``code`` and the message."""

    def __init__(self, message: str, code: int = EXIT_NO_REPLICA) -> None:
        super().__init__(message)
        self.code = code


class RunOver(Exception):
    """Raised within a coordinator: the run ends here, with exit code ``code``, and everybody is told why.

    ``by``: the worker whose word it is; None: it is the coordinator's own.
    """

    def __init__(self, code: int, reason: str, by: int | None = None) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason
        self.by = by
