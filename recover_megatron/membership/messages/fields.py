"""Parts of messages: the fields' types with their bounds, and what a member presents.

No incoming data is trusted. msgspec checks types and bounds when it decodes a message. ``read_runs`` (the decoders'
``dec_hook``) and ``__post_init__`` check what a ``Meta`` cannot express.
"""

from __future__ import annotations

import contextlib
from typing import Annotated, Any, Self

import msgspec
from msgspec import Meta, field

from recover_megatron.membership import records
from recover_megatron.membership.records import Runs, WorkerId, from_runs, to_runs
from recover_megatron.network.messages import Message, Number, Part

MAX_DEPTH = 100
"""Maximum depth of lists and objects in a status. A plan contains statuses, so it may be ten times as deep. That is
still less than the interpreter can encode again (about 1,500)."""

Worker = Annotated[WorkerId, Meta(ge=0, lt=records.MAX_WORKERS)]
Term = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
"""Term of a coordinator (``records.next_term``), of at most 63 bits: enough for 2**31 takeovers."""
PlanId = tuple[Number, Term]
"""Epoch and term of a plan: a coordinator makes one plan for each."""
NO_PLAN: PlanId = (0, 0)
Size = Annotated[int, Meta(ge=0, le=records.MAX_WORKERS)]
"""Number of workers."""
Pid = Annotated[int, Meta(ge=0, le=1 << 31)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Name = Annotated[str, Meta(max_length=256)]
Text = Annotated[str, Meta(max_length=2048)]
Address = tuple[Name, Annotated[int, Meta(ge=1, le=65535)]]
Hex32 = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
Rows = list[dict[str, Any]]
_CONTAINERS = {dict, list, tuple}


def read_runs(kind: type[Runs], value: Any) -> Runs:
    """Return the runs in a decoded value. Raises ValueError or TypeError unless they ascend below ``MAX_WORKERS``."""
    if type(value) is not list:
        raise TypeError("not a list")
    previous = -1
    for first, last in value:
        if not (type(first) is type(last) is int and previous < first <= last < records.MAX_WORKERS):
            raise ValueError("not ascending runs of workers")
        previous = last
    return kind(value)


def check_depth(value: Any, most: int) -> None:
    """Raise ValueError if ``value`` contains lists or objects more than ``most`` deep."""
    with contextlib.suppress(RecursionError, UnicodeEncodeError):  # too deep, or text that UTF-8 cannot represent
        text = msgspec.json.encode(value)
        if text.count(b"[") + text.count(b"{") <= most:  # most values: counting is much faster than the loop below
            return
    level: list[Any] = [[value]]
    for _ in range(most + 1):
        parts = (value.values() if type(value) is dict else value for value in level)
        level = [each for part in parts for each in part if type(each) in _CONTAINERS]
        if not level:
            return
    raise ValueError(f"lists or objects are more than {most} deep")


class OfEpoch(Message, frozen=True):
    """Message about one epoch or rendezvous."""

    epoch: Number


class OfRendezvous(OfEpoch, frozen=True):
    """Message about the rendezvous of one coordinator."""

    term: Term


class Epoch(Part, frozen=True):
    """An epoch, or a rendezvous: its number, its coordinator's term and its members."""

    epoch: Number
    term: Term
    members: Runs

    @classmethod
    def of(cls, formed: records.Formed) -> Self:
        """Return an epoch or a rendezvous as a part of a message."""
        return cls(formed.epoch, formed.term, to_runs(formed.members))

    def formed(self) -> records.Formed:
        return records.Formed(self.epoch, from_runs(self.members), self.term)

    def opened(self) -> records.Opened:
        return records.Opened(self.epoch, from_runs(self.members), self.term)


class Presented(Part, frozen=True):
    """A member's ``records.Presentation``."""

    term: Term
    formed: Epoch
    committed: Number
    dead: Runs
    left: Runs
    aside: Runs = field(default_factory=Runs)
    opened: Epoch | None = None

    @staticmethod
    def of(known: records.Presentation) -> Presented:
        """Return a member's knowledge as a part of a message; later changes of ``known`` do not change it."""
        dead, left, aside = map(to_runs, (known.dead, known.left, known.aside))
        opened = Epoch.of(known.opened) if known.opened is not None else None
        return Presented(known.term, Epoch.of(known.formed), known.committed, dead, left, aside, opened)

    def presentation(self) -> records.Presentation:
        dead, left, aside = map(from_runs, (self.dead, self.left, self.aside))
        opened = self.opened.opened() if self.opened is not None else None
        return records.Presentation(self.term, self.formed.formed(), opened, self.committed, dead, left, aside)


NOTHING = Presented.of(records.Presentation())
"""Presentation of a member that has followed no coordinator."""
