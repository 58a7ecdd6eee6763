"""The ring as a state machine: who may send and who may take, with the receivers' slots as the only limit.

One member's progress through its program is a row of two kinds of steps, and what each needs:

    SEND   the transport moves the next message that is ready: a free slot at the successor
    TAKE   the first message asked for has come and is dealt with; the ring looks at what was sent, and asks for more

A message occupies a slot of its receiver from SEND on: until TAKE, or, if it is a partial sum to pass on, until that
was sent *and* the ring has looked.  When a member that waits looks is the ``Rule``.  Steps of different members, and
SEND and TAKE of one, come in any order: the kernel decides.  (That a freed slot is heard of late needs no step of its
own: the predecessor may always send later.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate
from typing import NamedTuple

from recover_megatron.collectives.ring.schedule import Action, Program

LOOKAHEAD = 1
"""``Transport.lookahead``: how many receives are asked for ahead of the one that is waited for."""


class Rule(Enum):
    """When a member that waits for a message looks at what it has sent."""

    WHILE_WAITING = "whenever the transport tells that something was sent"
    AFTER_THE_WAIT = "not before the message has come"


class Step(Enum):
    SEND = "send"
    TAKE = "take"


class Place(NamedTuple):
    """How far a member is: messages dealt with, asked for, sent, and seen to be sent."""

    taken: int = 0
    asked: int = 0
    sent: int = 0
    seen: int = 0


Places = tuple[Place, ...]
Move = tuple[int, Step]


@dataclass(frozen=True)
class _Part:
    """What a program says of one member, by the number of messages."""

    ready: tuple[int, ...]
    """By messages taken: how many sends are ready."""
    kept: tuple[int, ...]
    """By messages taken: how many of them were partial sums to pass on."""
    passed: tuple[int, ...]
    """By messages seen to be sent: how many of them were such partial sums."""
    partials: int

    @classmethod
    def of(cls, program: Program) -> _Part:
        ready, count = [], 0
        for taken in range(len(program.receives) + 1):
            while count < len(program.sends) and program.sends[count].after <= taken:
                count += 1
            ready.append(count)
        kept = accumulate((r.action is Action.ADD for r in program.receives), initial=0)
        passed = accumulate((s.partial and s.hop > 0 for s in program.sends), initial=0)
        return cls(tuple(ready), tuple(kept), tuple(passed), program.partials)

    @property
    def receives(self) -> int:
        return len(self.kept) - 1

    @property
    def sends(self) -> int:
        return len(self.passed) - 1


class RingModel:
    """A ring of ``programs`` by rank, each member with ``slots`` for what its predecessor sends."""

    def __init__(self, programs: Sequence[Program], slots: int, rule: Rule = Rule.WHILE_WAITING) -> None:
        self._parts = [_Part.of(program) for program in programs]
        self._slots = slots
        self._rule = rule

    @property
    def start(self) -> Places:
        return tuple(self._ask(rank, Place()) for rank in range(len(self._parts)))

    def over(self, places: Places) -> bool:
        """Whether everybody has taken and sent everything."""
        return all(
            (place.taken, place.sent) == (part.receives, part.sends)
            for place, part in zip(places, self._parts, strict=True)
        )

    def moves(self, places: Places) -> Iterator[Move]:
        """Every step that somebody can take now."""
        for rank, (place, part) in enumerate(zip(places, self._parts, strict=True)):
            successor = (rank + 1) % len(places)
            if place.sent < part.ready[place.taken] and self.used(places, successor) < self._slots:
                yield rank, Step.SEND
            if place.taken < min(place.asked, places[rank - 1].sent):
                yield rank, Step.TAKE

    def after(self, places: Places, move: Move) -> Places:
        """What a step that can be taken makes of ``places``."""
        rank, step = move
        place = places[rank]
        if step is Step.TAKE:
            place = self._ask(rank, place._replace(taken=place.taken + 1, seen=place.sent))
        elif place.asked == place.taken:  # asked for nothing: it waits until this message has gone
            place = self._ask(rank, place._replace(sent=place.sent + 1, seen=place.sent + 1))
        else:
            seen = place.sent + 1 if self._rule is Rule.WHILE_WAITING else place.seen
            place = place._replace(sent=place.sent + 1, seen=seen)
        return (*places[:rank], place, *places[rank + 1 :])

    def used(self, places: Places, rank: int) -> int:
        """Slots of ``rank`` that are occupied."""
        return places[rank - 1].sent - places[rank].taken + self._held(rank, places[rank])

    def _held(self, rank: int, place: Place) -> int:
        part = self._parts[rank]
        return part.kept[place.taken] - part.passed[place.seen]

    def _ask(self, rank: int, place: Place) -> Place:
        part = self._parts[rank]
        while place.asked < part.receives and place.asked - place.taken <= LOOKAHEAD:
            if place.asked - place.taken + self._held(rank, place) > part.partials + LOOKAHEAD:
                break
            place = place._replace(asked=place.asked + 1)
        return place


def deadlock(model: RingModel) -> Places | None:
    """A state that can be reached, is not the end, and from which nobody can move; None if there is none at all."""
    start = model.start
    reached, to_do = {start}, [start]
    while to_do:
        places = to_do.pop()
        stuck = not model.over(places)
        for move in model.moves(places):
            stuck = False
            if (after := model.after(places, move)) not in reached:
                reached.add(after)
                to_do.append(after)
        if stuck:
            return places
    return None


def in_a_row(programs: Sequence[Program]) -> Program:
    """The programs of one member for several collectives, handed in together.

    The first hop of a later one is ready at once; what it passes on waits for its own receipts, which come after all
    receipts of those before it.
    """
    sends, receives = [], []
    for program in programs:
        sends += [replace(s, after=s.after + len(receives)) if s.after else s for s in program.sends]
        receives += program.receives
    return Program(tuple(sends), tuple(receives), max(program.partials for program in programs))
