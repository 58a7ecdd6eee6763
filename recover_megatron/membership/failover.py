"""What a candidate has been presented, merged: from it a lost coordinator's state is known again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recover_megatron.membership.records import Formed, Opened, Presentation, Workers, first_workers, from_runs, to_runs

_COUNTER_SHIFT = 32


def next_term(highest: int, salt: int) -> int:
    """A term above ``highest`` that no other coordinator has: the counter is one more, ``salt`` (32 bits) is random."""
    return ((highest >> _COUNTER_SHIFT) + 1 << _COUNTER_SHIFT) | salt


def presentation_to_wire(presentation: Presentation) -> dict[str, Any]:
    """The fields of an ``attach`` message that carry a presentation."""
    wire: dict[str, Any] = {
        "term": presentation.term,
        "formed_epoch": presentation.formed.epoch,
        "formed_term": presentation.formed.term,
        "formed_members": to_runs(presentation.formed.members),
        "committed": presentation.committed,
        "dead": to_runs(presentation.dead),
        "left": to_runs(presentation.left),
    }
    if presentation.aside:
        wire["aside"] = to_runs(presentation.aside)
    if presentation.opened is not None:
        wire["opened_epoch"] = presentation.opened.epoch
        wire["opened_term"] = presentation.opened.term
        wire["opened_members"] = to_runs(presentation.opened.members)
    return wire


def presentation_from_wire(message: Mapping[str, Any]) -> Presentation:
    """The presentation in a checked ``attach`` message."""
    opened = None
    if "opened_epoch" in message:
        opened = Opened(
            message["opened_epoch"], from_runs(message.get("opened_members", [])), message.get("opened_term", 0)
        )
    return Presentation(
        term=message["term"],
        formed=Formed(message["formed_epoch"], from_runs(message["formed_members"]), message["formed_term"]),
        opened=opened,
        committed=message["committed"],
        dead=from_runs(message["dead"]),
        left=from_runs(message["left"]),
        aside=from_runs(message.get("aside", [])),
    )


class Evidence:
    """All presentations a candidate has seen, merged. It only grows."""

    def __init__(self, world: int) -> None:
        self.formed = Formed(0, first_workers(world))
        self.opened: dict[tuple[int, int], Opened] = {}
        self.highest_term = 0
        self.highest_epoch = 0
        self.committed = 0
        self.dead: Workers = frozenset()
        self.left: Workers = frozenset()
        self.aside: Workers = frozenset()
        """Whom the newest rendezvous that anybody knows of has left out, alive; not what the safety rests on."""
        self._aside_in = (0, 0)  # the term and epoch of that one

    def add(self, presentation: Presentation) -> None:
        """Merge one more presentation."""
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
