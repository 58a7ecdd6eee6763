"""The members that carry out an operation on a group, of those whom its caller counts on.

A caller numbers the members of its group by the epoch that it knows.  Where some of them are lost in the middle of the
operation the others carry it out, and everything that is given by rank stays at the rank that the caller knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from recover_megatron.instep.errors import Disagreement

T = TypeVar("T")


@dataclass(frozen=True)
class Among:
    """Slots, in rank order: ``present`` of those ``expected`` by the caller."""

    expected: tuple[int, ...]
    present: tuple[int, ...]

    @property
    def all_there(self) -> bool:
        return len(self.present) == len(self.expected)

    def pick(self, by_rank: Sequence[T]) -> list[T]:
        """Of what is given by rank, the parts of those present."""
        return [by_rank[self.expected.index(slot)] for slot in self.present]

    def parts(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """The equal parts of a tensor, one for each that is expected, that belong to those present."""
        return self.pick(whole.view(-1).chunk(len(self.expected)))

    def from_root(self, options: Any, of_caller: int) -> Any:
        """``options`` for an operation that hands out what rank ``of_caller`` has.

        Raises Disagreement when it is gone: nobody has what the others wait for.
        """
        slot = self.expected[of_caller]
        if slot not in self.present:
            raise Disagreement(f"the worker in slot {slot} died while it gave the others something between two steps")
        options.rootRank = self.present.index(slot)
        return options

    def to_root(self, options: Any, of_caller: int) -> Any:
        """``options`` for an operation whose result rank ``of_caller`` gets.  When it is gone, somebody gets it."""
        slot = self.expected[of_caller]
        options.rootRank = self.present.index(slot) if slot in self.present else 0
        return options
