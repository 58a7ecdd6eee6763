"""Events that coordinator and members process, and effects that they return. ``session``: number of a connection."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from recover_megatron.membership.messages import to_coordinator, to_member
from recover_megatron.membership.records import Json, Workers

# -- into the coordinator ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Received:
    """A checked message from a member or observer. A member's first message is ``Attach`` or ``AttachNodeAgent``."""

    session: int
    message: to_coordinator.ToCoordinator


@dataclass(frozen=True)
class Closed:
    """End of a session.

    ``ended``: True if the other side's kernel closed the session (end of file or reset). Then the process has died,
    because a running process sends ``abandon`` or ``bye`` before it closes. False: the session ended for another reason
    (a malformed message, a full buffer, an unreachable network).
    """

    session: int
    ended: bool
    reason: str


@dataclass(frozen=True)
class Acknowledged:
    """Answer to ``Probe``. ``silence``: seconds for which the other host's kernel has acknowledged no sent data."""

    session: int
    silence: float
    delivered: bool = False
    """True if the other host's kernel has received all data sent to it, and no data from that host is unread."""


@dataclass(frozen=True)
class Verdict:
    """Answer to ``AskForLease``."""

    term: int
    epoch: int
    granted: bool | None
    """True: the lease was granted. False: it was refused. None: the storage has not answered; attempts continue."""
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
    """Passage of time: the ``deadline`` of the coordinator or member was reached."""


@dataclass(frozen=True)
class Settle:
    """End of a batch of events. The coordinator acts on the events of a batch together: 100 deaths cause one epoch."""


CoordinatorEvent = Received | Closed | Acknowledged | Verdict | Statement | Tick | Settle

# -- out of the coordinator -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Send:
    """Send one message to each of the sessions (encoded once)."""

    sessions: tuple[int, ...]
    message: to_member.ToMember


@dataclass(frozen=True)
class Close:
    """Flush and close a session; no ``Closed`` event follows."""

    session: int


@dataclass(frozen=True)
class Probe:
    """Ask the kernel when the other host last acknowledged data (``Acknowledged`` follows)."""

    session: int


@dataclass(frozen=True)
class AskForLease:
    """Request the lease for the members of a rendezvous, all of which follow its term (``Verdict`` follows)."""

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
    """Replace this coordinator by a ``fresh`` one, and stop asking for the lease.

    Another coordinator may lead now, so this one has refused its members. The fresh coordinator leads only if enough
    members attach to it.
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

    def send(self, sessions: Iterable[int], message: to_member.ToMember) -> None:
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
    """The dialed candidate's host has accepted the connection, so a process listens, but it has sent nothing yet."""


@dataclass(frozen=True)
class Challenged:
    """The dialed candidate has sent its challenge, so its process runs."""


@dataclass(frozen=True)
class Connected:
    """The dialed candidate is connected, and both sides have proved that they know the secret."""


@dataclass(frozen=True)
class Lost:
    """End of the connection, or failure of an attempt to connect."""

    reason: str
    refused: bool = False
    """True if the host has answered that no process listens at the candidate's address."""
    again: bool = False
    """True if only the node's relay has failed, so that the member must dial the same candidate again."""


@dataclass(frozen=True)
class Heard:
    """A checked message on the current connection."""

    message: to_member.ToMember


MemberEvent = Accepted | Challenged | Connected | Lost | Heard | Tick


# -- out of a member --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dial:
    """Connect to the candidate with index ``candidate``, and abort any attempt in progress."""

    candidate: int


@dataclass(frozen=True)
class Say:
    message: to_coordinator.ToCoordinator


@dataclass(frozen=True)
class Abandon:
    """Give up the current connection and send the reason.

    The socket stays open until the other side closes it, because the other side would interpret a close as a death.
    """

    reason: str


@dataclass(frozen=True)
class Hangup:
    """Close the connection without a message, because the other side has closed it or will do so."""


@dataclass(frozen=True)
class Look:
    """Replace the list of candidates that joined after the launch. They are tried after the launch's candidates."""

    added: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Notify:
    """Notification for the owner of a member's session: a message that the member obeys; None: the member is out."""

    message: to_member.ToMember | None


MemberEffect = Dial | Say | Abandon | Hangup | Look | Notify


class State(Enum):
    """State of a coordinator. Only the module ``coordinator`` changes it; the docstring there draws the transitions."""

    STANDBY = "standby"
    GATHERING = "gathering"
    RENDEZVOUS = "rendezvous"
    STEADY = "steady"
    STOPPED = "stopped"
    RETIRED = "retired"
    """Final state of a coordinator that has stepped down: a fresh candidate has replaced it."""
