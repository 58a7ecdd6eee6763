"""Messages from workers, launchers and observers to the coordinator; docs/membership.md has their order."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, field

from recover_megatron.membership.messages import fields as f
from recover_megatron.membership.records import Runs

MAX_ERROR = 2000
"""Maximum characters of an error's type and message."""
MAX_TRACEBACK = 16 << 10
"""Maximum characters of a traceback."""
MAX_TRIED = 4096
"""Maximum number of microbatches that a worker names as possible causes of its failure."""

_Place = Annotated[int, Meta(ge=0, lt=1 << 31)]


class Attach(f.Message, frozen=True):
    """First message of a worker. ``idle``, ``vacant``: as in ``Join``; ``silent``: its last coordinator was silent."""

    worker: f.Worker
    incarnation: f.Hex32
    host: f.Name
    pid: f.Pid
    presentation: f.Presented
    done: f.Number
    idle: f.Number = 0
    vacant: bool = False
    node_agent: f.Name = ""
    newcomer: bool = False
    silent: bool = False


class AttachNodeAgent(f.Message, frozen=True):
    """First message of a launcher. ``running``: the workers that it runs."""

    node: f.Name
    incarnation: f.Hex32
    presentation: f.Presented
    running: Runs = field(default_factory=Runs)
    silent: bool = False


Hello = Attach | AttachNodeAgent


class Heartbeat(f.Message, frozen=True):
    """A worker's last mark. ``place``: replica, position, quota; ``loss``: step and loss (None: it is not finite).

    ``number``: as in ``Beat``.
    """

    count: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    iteration: f.Number
    phase: f.Name
    waiting: bool
    allow: f.Seconds
    microbatch: f.Number | None = None
    place: tuple[_Place, _Place, _Place] | None = None
    goes_back: bool = False
    loss: tuple[f.Number, float | None] | None = None
    number: f.Number = 0


class Beat(f.Message, frozen=True):
    """Sign of life of a launcher. The answer repeats ``number``, which counts the heartbeats of the sender from 1."""

    number: f.Number = 0


class Join(f.OfEpoch, frozen=True):
    """A worker joins a rendezvous. ``done``, ``idle``, ``vacant``: its reports.

    ``holds``: the epoch whose plan it holds; ``plan``: that plan, packed, if the coordinator has asked for it.
    """

    status: Any
    done: f.Number
    idle: f.Number = 0
    vacant: bool = False
    holds: f.PlanId = f.NO_PLAN
    plan: Any = None

    def __post_init__(self) -> None:
        f.check_depth(self.status, f.MAX_DEPTH)
        if self.plan is not None:
            f.check_depth(self.plan, 10 * f.MAX_DEPTH)


class Done(f.OfEpoch, frozen=True):
    """Every segment of ``iteration`` is REDUCED at a worker."""

    iteration: f.Number


class Idle(f.OfEpoch, frozen=True):
    """A worker has no part in the epoch."""


class Complain(f.OfEpoch, frozen=True):
    """A worker asks for a new epoch. ``peer``: the worker with which an operation failed."""

    reason: f.Text
    peer: f.Worker | None = None


class Ack(f.OfRendezvous, frozen=True):
    """A launcher knows of the rendezvous."""


class Heard(f.OfRendezvous, frozen=True):
    """A worker uses no result of an epoch before this rendezvous any more."""


class Ended(f.Message, frozen=True):
    """A worker's process has ended."""

    worker: f.Worker
    how: f.Name


class Candidate(f.Message, frozen=True):
    """A launcher that joined hosts a candidate."""

    address: f.Address


class Stopping(f.Message, frozen=True):
    """A signal has ordered a launcher to stop its workers."""

    signal: Annotated[int, Meta(ge=1, le=64)]


class Spawned(f.Message, frozen=True):
    """A launcher has started a worker."""

    worker: f.Worker
    pid: f.Pid


class Bye(f.Message, frozen=True):
    """A worker leaves normally. ``idle``: the last epoch in which it has no part; 0: none."""

    idle: f.Number = 0


class GiveUp(f.Message, frozen=True):
    """A worker asks for the end of the run."""

    code: Annotated[int, Meta(ge=1, le=255)]
    reason: f.Text


class ReportException(f.Message, frozen=True):
    """An exception ends a worker; fields as in ``ending.ExceptionReport``."""

    iteration: f.Number
    error: Annotated[str, Meta(max_length=MAX_ERROR)]
    traceback: Annotated[str, Meta(max_length=MAX_TRACEBACK)]
    group: f.Worker
    microbatch: f.Number | None = None
    phase: f.Name = ""
    tried: Annotated[list[f.Number], Meta(max_length=MAX_TRIED)] = field(default_factory=list)
    own: bool = False


class Note(f.Message, frozen=True):
    """Text for the event log and workers.json."""

    text: f.Text


class Abandon(f.Message, frozen=True):
    """A member leaves the coordinator, and looks for another one."""

    reason: f.Text


class Observe(f.Message, frozen=True):
    """An observer asks for a ``View``."""


class Drain(f.Message, frozen=True):
    """An observer asks for a ``View``, and for the drain of a node or host."""

    node: f.Name


class DrainAnswer(f.OfEpoch, frozen=True):
    """Decision of the epoch's members about a drain. ``reason``: why it is refused; empty: it is accepted."""

    node: f.Name
    reason: f.Text


ToCoordinator = (
    Hello | Heartbeat | Beat | Join | Done | Idle | Complain | Ack | Heard | Ended | Candidate
    | Stopping | Spawned | Bye | GiveUp | ReportException | Note | Abandon | Observe | Drain | DrainAnswer
)  # fmt: skip
