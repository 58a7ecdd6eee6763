"""Messages from the coordinator to members and observers; docs/membership.md has their order."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, field

from recover_megatron.membership.messages import fields as f
from recover_megatron.membership.records import MOST_ADDED, Runs


class Beat(f.Message, frozen=True):
    """Answer to the heartbeat with the number ``answers``; 0: this is a request for a heartbeat."""

    answers: f.Number = 0


class Standby(f.Message, frozen=True):
    """The candidate does not lead."""


class Lead(f.Message, frozen=True):
    """The candidate leads, and waits for more members."""

    term: f.Term


class Refused(f.Message, frozen=True):
    """The coordinator closes this connection."""

    reason: f.Text


class Revoke(f.Message, f.Epoch, frozen=True):
    """The last epoch is over, and a rendezvous is open.

    ``present_plan``: the worker that must present its plan. ``after``: the last epoch, if the receiver may not know it.
    """

    dead: Runs
    left: Runs
    committed: f.Number
    reason: f.Text
    aside: Runs = field(default_factory=Runs)
    present_plan: f.Worker | None = None
    after: f.Epoch | None = None


class AllHeard(f.OfRendezvous, frozen=True):
    """All live workers know of this rendezvous, or a later one."""


class Plan(f.Message, f.Epoch, frozen=True):
    """Plan of a formed epoch. Launchers get no ``data``.

    ``data``: the planner's answer, packed (``plan_changes``); ``base``: the plan that the receiver needs to unpack it.
    """

    committed: f.Number
    data: Any = None
    base: f.PlanId = f.NO_PLAN


class Commit(f.OfEpoch, frozen=True):
    """The iteration is committed."""

    iteration: f.Number


class Kill(f.Message, frozen=True):
    """A launcher must kill an evicted worker. ``together``: all workers that are evicted with it."""

    worker: f.Worker
    reason: f.Text
    together: Runs = field(default_factory=Runs)


class Note(f.Message, frozen=True):
    """A launcher must write a worker's note to workers.json."""

    worker: f.Worker
    text: f.Text


class Fenced(f.Message, frozen=True):
    """The worker is evicted."""

    reason: f.Text


class Stop(f.Message, frozen=True):
    """The run has ended. ``by``: the worker that ended it; ``left``: the workers that have left normally."""

    reason: f.Text
    code: Annotated[int, Meta(ge=0, le=255)]
    epoch: f.Number
    by: f.Worker | None = None
    left: Runs = field(default_factory=Runs)


class Noted(f.Message, frozen=True):
    """The exception report has arrived."""


class Candidates(f.Message, frozen=True):
    """Candidates that joined after the launch. Launchers also get what a candidate needs: see ``AddedCandidates``."""

    added: Annotated[list[f.Address], Meta(max_length=MOST_ADDED)]
    world: f.Size
    lease: Annotated[str, Meta(max_length=4096)] | None = None
    slack: f.Size = 0
    witnessed: bool = False


class Tell(f.Message, frozen=True):
    """A launcher must print this text."""

    text: f.Text


class Drain(f.Message, frozen=True):
    """A launcher's node is drained. ``stays``: the drain was refused after all."""

    stays: bool = False


class View(f.OfRendezvous, frozen=True):
    """The run's state, for observers."""

    state: f.Name
    opened: f.Number
    committed: f.Number
    launched: f.Size
    world: f.Size
    live: f.Size
    replicas: Any
    replica_size: f.Size
    workers: f.Rows
    hidden: f.Size
    faults: f.Rows
    recoveries: f.Rows
    commit_age: f.Seconds | None = None
    stall: Any = None
    drains: f.Rows = field(default_factory=list)


ToMember = (
    Beat | Standby | Lead | Refused | Revoke | AllHeard | Plan | Commit | Kill | Note | Fenced | Stop | Noted
    | Candidates | Tell | Drain | View
)  # fmt: skip
