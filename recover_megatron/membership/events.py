"""What goes into a state machine (events) and what comes out (effects). ``session`` is the number of a connection."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from recover_megatron.membership.records import Json, Workers

# -- into the coordinator ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Received:
    """A checked message arrived. The first one of a session is ``attach`` or ``attach_node_agent``."""

    session: int
    message: Mapping[str, Any]


@dataclass(frozen=True)
class Closed:
    """A session ended.

    ``ended``: the other side's kernel closed it (end of file or reset), which a process that runs does not let happen
    without an ``abandon`` or ``bye`` before. False: a malformed message, a full buffer, an unreachable network.
    """

    session: int
    ended: bool
    reason: str


@dataclass(frozen=True)
class Acknowledged:
    """Answer to ``Probe``: for how many seconds the other host's kernel has acknowledged nothing of what we sent."""

    session: int
    silence: float
    delivered: bool = False
    """Whether that kernel has all that we sent, and we have read all that its process had said before."""


@dataclass(frozen=True)
class Verdict:
    """The answer to ``AskForLease``."""

    term: int
    epoch: int
    granted: bool | None
    """None: there is no answer yet, and it is tried on."""
    reason: str = ""


@dataclass(frozen=True)
class Statement:
    """What the witness has said (``AskWitness``), or why nothing is heard of it."""

    off: frozenset[str]
    """Nodes on which nothing runs any more, for certain, by the names of their launchers."""
    reason: str = ""
    """For people."""


@dataclass(frozen=True)
class Tick:
    """Time has passed: ``Coordinator.deadline`` was reached."""


@dataclass(frozen=True)
class Settle:
    """All events that were ready are handled: act on them together (a hundred deaths at once make one new epoch)."""


CoordinatorEvent = Received | Closed | Acknowledged | Verdict | Statement | Tick | Settle

# -- out of the coordinator -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Send:
    """Send one message to each of the sessions (encoded once)."""

    sessions: tuple[int, ...]
    message: Mapping[str, Any]


@dataclass(frozen=True)
class Close:
    """Flush and close a session; no ``Closed`` event follows."""

    session: int


@dataclass(frozen=True)
class Probe:
    """Ask the kernel when the other host last acknowledged anything (``Acknowledged`` follows)."""

    session: int


@dataclass(frozen=True)
class AskForLease:
    """Ask for the lease, for these members of a rendezvous that all have joined (``Verdict`` follows)."""

    term: int
    epoch: int
    members: Workers
    renew: bool = field(default=False, compare=False)
    """The epoch is formed, and nobody waits for the answer: see ``lease.is_due``."""


@dataclass(frozen=True)
class AskWitness:
    """Ask the witness about these nodes (``Statement`` may follow)."""

    nodes: frozenset[str]


@dataclass(frozen=True)
class Log:
    record: Mapping[str, Json]


@dataclass(frozen=True)
class StepDown:
    """This coordinator may be superseded, and has told its members: replace it by a ``fresh`` one, which leads again
    when a majority comes to it, and ask for the lease no more."""


@dataclass(frozen=True)
class Exit:
    """The coordinator's work is over; flush, then end with this code."""

    code: int
    reason: str


CoordinatorEffect = Send | Close | Probe | AskForLease | AskWitness | Log | StepDown | Exit


class Outbox:
    """The effects of the event that a coordinator handles, in order; all of its parts put theirs in."""

    def __init__(self) -> None:
        self._effects: list[CoordinatorEffect] = []

    def do(self, effect: CoordinatorEffect) -> None:
        self._effects.append(effect)

    def log(self, event: str, **fields: Json) -> None:
        self.do(Log({"event": event, **fields}))

    def send(self, sessions: Iterable[int], message: Mapping[str, Any]) -> None:
        """Send a message to each of ``sessions``; nothing if there are none."""
        if targets := tuple(sessions):
            self.do(Send(targets, message))

    def take(self) -> list[CoordinatorEffect]:
        """All effects since the last call."""
        effects, self._effects = self._effects, []
        return effects


# -- into a member ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Accepted:
    """The host of the candidate that was dialed has accepted the connection, so its process exists; it has said
    nothing."""


@dataclass(frozen=True)
class Connected:
    """The candidate that was dialed is connected, and both sides have proved that they know the secret."""


@dataclass(frozen=True)
class Lost:
    """The connection, or the attempt to make one, has failed or was ended by the other side."""

    reason: str
    refused: bool = False
    """The host has answered that no process listens there."""


@dataclass(frozen=True)
class Heard:
    """A checked message arrived on the current connection."""

    message: Mapping[str, Any]


MemberEvent = Accepted | Connected | Lost | Heard | Tick


# -- out of a member --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dial:
    """Connect to candidate ``candidate`` (and abort any attempt in progress)."""

    candidate: int


@dataclass(frozen=True)
class Say:
    message: Mapping[str, Any]


@dataclass(frozen=True)
class Abandon:
    """Give up the current connection, telling why. It stays open while the other side may read it: a close looks like
    a death."""

    reason: str


@dataclass(frozen=True)
class Hangup:
    """The other side has closed or will: just close."""


@dataclass(frozen=True)
class Look:
    """From now on the candidates are those of the launch, and after them these."""

    added: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Notify:
    """Something the owner may be waiting for changed; ``kind``: "revoke", "plan", "commit", "out", "kill", "tell",
    "drain" or "candidates"."""

    kind: str
    detail: Mapping[str, Any] = field(default_factory=dict)


MemberEffect = Dial | Say | Abandon | Hangup | Look | Notify


class State(Enum):
    """See the drawing in ``coordinator``, the only module that changes it."""

    STANDBY = "standby"
    GATHERING = "gathering"
    RENDEZVOUS = "rendezvous"
    STEADY = "steady"
    STOPPED = "stopped"
    RETIRED = "retired"
    """It has stepped down: a fresh one has its place."""
