"""Events into a state machine, and effects out of it. ``session`` is the number of a connection."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from recover_megatron.membership.records import Json, Workers

# -- into the coordinator ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Received:
    """A checked message. The first one of a session is ``attach`` or ``attach_node_agent``."""

    session: int
    message: Mapping[str, Any]


@dataclass(frozen=True)
class Closed:
    """End of a session.

    ``ended``: True if the other side's kernel closed the session (end of file or reset): its process has died, because
    a running process sends ``abandon`` or ``bye`` before it closes. False: a malformed message, a full buffer, an
    unreachable network.
    """

    session: int
    ended: bool
    reason: str


@dataclass(frozen=True)
class Acknowledged:
    """Answer to ``Probe``: for how many seconds the other host's kernel has acknowledged none of the sent data."""

    session: int
    silence: float
    delivered: bool = False
    """True if that kernel has received all sent data, and all data that its process had sent before was read."""


@dataclass(frozen=True)
class Verdict:
    """Answer to ``AskForLease``."""

    term: int
    epoch: int
    granted: bool | None
    """None: there is no answer yet, and the attempts continue."""
    reason: str = ""


@dataclass(frozen=True)
class Statement:
    """Statement of the witness (answer to ``AskWitness``), or the reason why it does not answer."""

    off: frozenset[str]
    """Nodes on which certainly no process runs any more, by the names of their launchers."""
    reason: str = ""
    """Text for the log."""


@dataclass(frozen=True)
class Tick:
    """Time has passed: ``Coordinator.deadline`` was reached."""


@dataclass(frozen=True)
class Settle:
    """All ready events are handled: act on them together (a hundred simultaneous deaths make one new epoch)."""


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
    """Ask for the lease for the members of a rendezvous, all of which have joined (``Verdict`` follows)."""

    term: int
    epoch: int
    members: Workers
    renew: bool = field(default=False, compare=False)
    """True if the epoch is formed, and no rendezvous waits for the answer: see ``lease.is_due``."""


@dataclass(frozen=True)
class AskWitness:
    """Ask the witness about these nodes (``Statement`` may follow)."""

    nodes: frozenset[str]


@dataclass(frozen=True)
class Log:
    record: Mapping[str, Json]


@dataclass(frozen=True)
class StepDown:
    """Replace this coordinator, which may be superseded and has notified its members, by a ``fresh`` one.

    The fresh one leads again when a majority attaches to it. Stop asking for the lease.
    """


@dataclass(frozen=True)
class Exit:
    """End of the coordinator's work: flush, then exit with this code."""

    code: int
    reason: str


CoordinatorEffect = Send | Close | Probe | AskForLease | AskWitness | Log | StepDown | Exit


class Outbox:
    """Effects of the event that a coordinator is handling, in order; each part of the coordinator adds effects."""

    def __init__(self) -> None:
        self._effects: list[CoordinatorEffect] = []

    def do(self, effect: CoordinatorEffect) -> None:
        self._effects.append(effect)

    def log(self, event: str, **fields: Json) -> None:
        self.do(Log({"event": event, **fields}))

    def send(self, sessions: Iterable[int], message: Mapping[str, Any]) -> None:
        """Send a message to each of ``sessions``; do nothing if there are none."""
        if targets := tuple(sessions):
            self.do(Send(targets, message))

    def take(self) -> list[CoordinatorEffect]:
        """Return all effects since the last call."""
        effects, self._effects = self._effects, []
        return effects


# -- into a member ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Accepted:
    """The dialed candidate's host has accepted the connection, so a process listens; it has sent nothing yet."""


@dataclass(frozen=True)
class Connected:
    """The dialed candidate is connected, and both sides have proved that they know the secret."""


@dataclass(frozen=True)
class Lost:
    """End of the connection, by a failure or by the other side, or a failed attempt to connect."""

    reason: str
    refused: bool = False
    """True if the host has answered that no process listens there."""


@dataclass(frozen=True)
class Heard:
    """A checked message on the current connection."""

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
    """Give up the current connection and send the reason.

    The socket stays open until the other side closes it, because a close looks like a death.
    """

    reason: str


@dataclass(frozen=True)
class Hangup:
    """Close the connection without a message, because the other side has closed it or will do so."""


@dataclass(frozen=True)
class Look:
    """Replace the candidates that follow the launch's candidates in the list by ``added``."""

    added: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Notify:
    """Notification of the session's owner.

    ``kind``: "revoke", "plan", "commit", "out", "kill", "tell", "drain" or "candidates".
    """

    kind: str
    detail: Mapping[str, Any] = field(default_factory=dict)


MemberEffect = Dial | Say | Abandon | Hangup | Look | Notify


class State(Enum):
    """States of a coordinator. See the drawing in ``coordinator``, the only module that changes the state."""

    STANDBY = "standby"
    GATHERING = "gathering"
    RENDEZVOUS = "rendezvous"
    STEADY = "steady"
    STOPPED = "stopped"
    RETIRED = "retired"
    """Final state of a coordinator that has stepped down: a fresh candidate has replaced it."""
