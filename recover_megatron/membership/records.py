"""Records that the coordinator and its members exchange, settings of the protocol, and exceptions.

A wait on the control plane that ends without its result raises one of these exceptions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any, NewType, cast

Json = Any
"""A value that ``json.dumps`` accepts: statuses and plans consist of such values."""

WorkerId = NewType("WorkerId", int)
"""Permanent number of a worker of the run; not a session, rank or slot."""
Workers = frozenset[WorkerId]
Address = tuple[str, int]
"""Host and port of a candidate coordinator."""


class Runs(list[list[int]]):
    """A set of worker ids in a message: sorted ranges ``[[first, last], ...]``, both ends included."""


MAX_WORKERS = 1 << 20
"""All worker ids are below this number. It also limits the size of the set that ``from_runs`` returns."""

FIRST_JOINED = 1 << 10
"""Lowest number of a candidate that joined after the launch; the number is in the name of its event log."""

JOINED_FROM = 1 << 19
"""Lowest id of a worker whose launcher joined the run after the launch."""

MOST_ADDED = 3
"""Maximum number of listed candidates that joined after the launch. If one is lost, another takes its place."""


def to_runs(workers: Iterable[int]) -> Runs:
    runs = Runs()
    for worker in sorted(workers):
        if runs and worker == runs[-1][1] + 1:
            runs[-1][1] = worker
        else:
            runs.append([worker, worker])
    return runs


runs_of = lru_cache(32)(to_runs)
"""``to_runs`` for a set that many messages contain: at the start, each worker that attaches gets the same sets."""


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers as text: "0-3, 7" for 0, 1, 2, 3, 7."""
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in to_runs(numbers))


def cut_middle(text: str, limit: int) -> str:
    """Return ``text``, cut in the middle to ``limit`` characters. Both ends of a traceback are informative."""
    if len(text) <= limit:
        return text
    mark = f"\n[... {len(text) - limit} or more characters cut ...]\n"
    head = (limit - len(mark)) // 2
    return text[:head] + mark + text[len(text) - (limit - len(mark) - head) :]


def from_runs(runs: list[list[int]]) -> Workers:
    """Return the workers in ``runs``, which must be bounded and ascend (``messages.fields.read_runs``)."""
    return cast("Workers", frozenset(worker for first, last in runs for worker in range(first, last + 1)))


def first_workers(world: int) -> Workers:
    """Return the workers that a run of ``world`` workers is launched with."""
    return cast("Workers", frozenset(range(world)))


@dataclass(frozen=True)
class Settings:
    """Settings of the protocol, times in seconds. All processes of one run must use equal settings."""

    heartbeat_interval: float = 1.0
    heartbeat_timeout: float = 5.0
    """Workers on a host that is silent for this long are evicted."""
    hang_timeout: float = 60.0
    """A worker that other workers wait for is evicted after this long without a new progress mark."""
    stall_timeout: float = 600.0
    """Maximum wait for a stopped process that cannot be replaced, and for late workers if more than half of the
    replicas are late at the same time (see ``detect``)."""
    start_timeout: float = 3600.0
    """All workers must have attached to the first rendezvous within this time, in which data sets are indexed and
    checkpoints are read."""
    max_stuck_epochs: int = 3
    """The run ends after more than this many consecutive epochs in which all workers wait for each other, and without
    a commit in between."""

    grace: float = 0.0
    """A replica is set aside (``lateness``) if all other replicas have waited for it this long in a step; 0: never."""
    min_replicas: int = 1
    """No replica is set aside if fewer replicas than this number would remain."""
    start_needs_all: bool = False
    """True if the loss of a launched worker before the first plan ends the run."""

    @classmethod
    def of(cls, flags: object, **others: Any) -> Settings:
        """Return settings from ``others`` and the attributes of ``flags``, by name; the rest have their defaults."""
        names = [each.name for each in fields(cls) if hasattr(flags, each.name)]
        return cls(**{name: getattr(flags, name) for name in names}, **others)

    @property
    def lost_timeout(self) -> float:
        """Time after which a member without a leading coordinator gives up (``CoordinatorLost``)."""
        return 4 * self.heartbeat_timeout


ADMITTED = "is admitted"
"""Text that follows a newcomer's name in the reason for an epoch."""
NEW_COORDINATOR = "a new coordinator leads"
"""Reason for an epoch after the loss of a coordinator."""


@dataclass(frozen=True)
class Formed:
    """An epoch whose plan was decided. Epoch 0 is the launch: it has all workers of the run, and no plan."""

    epoch: int
    members: Workers
    term: int = 0

    @property
    def plan_id(self) -> tuple[int, int]:
        """Epoch and term, which no two plans share."""
        return self.epoch, self.term


class Opened(Formed):
    """A rendezvous that was opened, even if its epoch was not formed; ``members``: the workers that it waits for."""


@dataclass(frozen=True)
class Plan:
    """Decision of an epoch; all members receive identical bytes."""

    epoch: int
    members: Workers
    committed: int
    """The last committed iteration. A worker that had reported done(t) with t <= committed must apply step t."""
    data: Json
    """The planner's answer, a JSON value."""


@dataclass(frozen=True)
class PlanRequest:
    """All input of a planner: a plan is a pure function of it."""

    epoch: int
    members: tuple[WorkerId, ...]
    """Sorted worker ids of the new epoch."""
    statuses: Mapping[WorkerId, Json]
    """Worker id -> the status with which the member joined."""
    previous: Json
    """The plan data of the last formed epoch; None before the first."""
    committed: int
    """The last committed iteration, including decisions of this rendezvous."""
    lost: Mapping[WorkerId, Json] = field(default_factory=dict)
    """Missing member of the last epoch that has not left normally -> last known ``iteration`` and ``phase``, and
    ``aside`` (True if the worker was set aside)."""
    drain: tuple[str, ...] = ()
    """Names of nodes that will be switched off if the members decide that the run can continue without them."""
    aside: tuple[WorkerId, ...] = ()
    """Live workers that were set aside as late, and may come back."""


Planner = Callable[[PlanRequest], Json]


def members_only(request: PlanRequest) -> Json:
    """Return a plan that only lists members, their statuses, and lost workers; each member computes the rest from it.

    The plan also lists the nodes to ``drain`` and the workers ``aside``, if there are any.
    """
    plan = {
        "members": list(request.members),
        "statuses": {str(member): request.statuses[member] for member in request.members},
        "lost": {str(worker): last for worker, last in request.lost.items()},
    }
    more = {"drain": list(request.drain), "aside": list(request.aside)}
    return {**plan, **{name: value for name, value in more.items() if value}}


@dataclass
class Presentation:
    """A member's knowledge of terms, epochs and ended workers, presented to each coordinator to which it attaches.

    The safety of a failover depends on this record (``leadership``), so it only ever grows.
    """

    term: int = 0
    """The highest term followed; 0: none yet."""
    formed: Formed = field(default_factory=lambda: Formed(0, frozenset()))
    opened: Opened | None = None
    """The last rendezvous joined or acknowledged, if it is newer than ``formed``."""
    committed: int = 0
    dead: Workers = frozenset()
    """Workers known to have ended, as the coordinator reported."""
    left: Workers = frozenset()
    """Workers that had left normally."""
    aside: Workers = frozenset()
    """Live workers that the newest of ``formed`` and ``opened`` leaves out because they are late: they may come
    back."""

    @property
    def mentioned(self) -> Workers:
        opened = self.opened.members if self.opened is not None else frozenset()
        return self.formed.members | opened | self.dead | self.left | self.aside


_COUNTER_SHIFT = 32


def next_term(highest: int, salt: int) -> int:
    """Return a unique term above ``highest``: the next counter in the high bits, random ``salt`` in the low 32 bits.

    Messages carry terms of at most 63 bits, so a run has fewer than 2**31 terms.
    """
    return ((highest >> _COUNTER_SHIFT) + 1 << _COUNTER_SHIFT) | salt


class Evidence:
    """Merge of all presentations that a candidate has received: its knowledge of a lost coordinator's state."""

    def __init__(self, world: int) -> None:
        self.formed = Formed(0, first_workers(world))
        self.opened: dict[tuple[int, int], Opened] = {}
        self.highest_term = 0
        self.highest_epoch = 0
        self.committed = 0
        self.dead: Workers = frozenset()
        self.left: Workers = frozenset()
        self.aside: Workers = frozenset()
        """Live workers that the newest known rendezvous left out because they are late. No safety rule uses it."""
        self._aside_in = (0, 0)  # term and epoch of that rendezvous

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
        """Rendezvous newer than the last epoch known to be formed. Each may have been formed unseen."""
        return [self.opened[key] for key in sorted(self.opened) if self.opened[key].epoch > self.formed.epoch]

    @property
    def bases(self) -> list[Workers]:
        """Sets of workers; a new coordinator needs a majority of each set."""
        return [self.formed.members, *(opened.members for opened in self.unfinished)]

    @property
    def target(self) -> Workers:
        """Workers that the run counts on: members of the newest known rendezvous, formed or not."""
        unfinished = self.unfinished
        return unfinished[-1].members if unfinished else self.formed.members


EXIT_SAME_FAULT = 1
"""Exit code of a run ended by an exception that every worker would raise."""
EXIT_NO_REPLICA = 10
"""Exit code of a run that has too few live workers for one replica."""
EXIT_LOST_MAJORITY = 11
"""Exit code of a worker or a run that no coordinator may continue."""
EXIT_STATE_LOST = 12
"""Exit code of a run whose live workers together do not hold the complete state."""
EXIT_FENCED = 13
"""Exit code of an evicted worker; the run continues without it."""


class MembershipError(Exception):
    """Base class of this package's exceptions that report a state of the run, never a programming error."""


class EpochRevoked(MembershipError):
    """Raised when the epoch of an operation is over. The caller must ``join`` the next epoch."""

    def __init__(self, epoch: int, reason: str = "") -> None:
        super().__init__(f"epoch {epoch} was revoked" + (f": {reason}" if reason else ""))
        self.epoch = epoch
        self.reason = reason


class Fenced(MembershipError):
    """Raised on an evicted worker. Its process must exit (code ``EXIT_FENCED``); the other workers continue."""


class CoordinatorLost(MembershipError):
    """Raised when no coordinator may continue the run for this worker; ``code`` is the exit code.

    ``by``: the worker that ended the run for all (``give_up``, ``report_exception``); None: no worker ended it.
    ``reported``: True if a coordinator has reported the end. False if no coordinator was reached: then the run may
    continue without this worker, or may have ended successfully.
    """

    def __init__(
        self, message: str, code: int = EXIT_LOST_MAJORITY, by: int | None = None, *, reported: bool = False
    ) -> None:
        super().__init__(message)
        self.code = code
        self.by = by
        self.reported = reported


class SecretError(MembershipError):
    """The job's secret is missing, unreadable, too short, or readable by others; the message names the remedy."""


class AuthenticationError(MembershipError):
    """The other side of a connection does not know the job's secret."""


class NoPlan(Exception):
    """Raised by a planner if the survivors cannot continue; the run stops with ``code`` and the message."""

    def __init__(self, message: str, code: int = EXIT_NO_REPLICA) -> None:
        super().__init__(message)
        self.code = code


class RunOver(Exception):
    """Raised within a coordinator to end the run with exit code ``code``; all members then receive the reason.

    ``by``: the worker whose message ended the run; None: the coordinator decided to end it.
    """

    def __init__(self, code: int, reason: str, by: WorkerId | None = None) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason
        self.by = by
