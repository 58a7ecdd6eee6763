"""Which samples a microbatch has: by where it begins in the run, and by nothing else; and iterations that are left out.

Microbatch j of the iteration that starts at ``consumed`` samples begins at consumed + j * size.

    InOrder    --dataloader-type single: the samples from there on
    Shuffled   --dataloader-type cyclic: those that Megatron's shuffling sampler gives the data-parallel rank j % ranks,
               epoch after epoch
    InTurn     --full-validation: one sample for each rank in turn, each rank's again and again

The samples of iterations that are left out (--iterations-to-skip) count as consumed, and nobody reads them.  A state's
version counts such iterations with the one before them, of which they change nothing: a worker that begins anew begins
after them.  steps.jsonl has no line of them, and the line that follows says how many they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, Protocol

import torch
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.training import get_args

from recover_megatron.integrate import Loop


class Order(Protocol):
    """The samples of a microbatch."""

    def samples(self, first: int) -> list[int] | None:
        """Of the microbatch that begins at ``first``; None: the data set has no more."""


class InOrder:
    """The samples of a data set of ``total`` as they lie; ``size``: of a microbatch."""

    def __init__(self, total: int, size: int) -> None:
        self._total = total
        self._size = size

    def samples(self, first: int) -> list[int] | None:
        """See ``Order``."""
        return list(range(first, first + self._size)) if first + self._size <= self._total else None


class InTurn:
    """The samples of a data set of ``total``, one for each of the ``ranks`` of the launch in turn: microbatches of one.

    A rank that is through with its own begins with them again, at once: at the end of the data set others may still
    have one.
    """

    def __init__(self, total: int, ranks: int) -> None:
        if total < ranks:
            raise ValueError(f"{total} samples are not one for each of {ranks} ranks")
        self._total = total
        self._ranks = ranks

    @property
    def rounds(self) -> int:
        """After how many microbatches all ranks are through with theirs."""
        return -(-self._total // self._ranks)

    def samples(self, first: int) -> list[int] | None:
        """See ``Order``."""
        turn, rank = divmod(first, self._ranks)
        its = -(-(self._total - rank) // self._ranks)
        return [turn % its * self._ranks + rank]


class Shuffled:
    """The samples of a data set, shuffled anew in each epoch.

    An epoch has as many microbatches for each of the ``ranks`` of the launch, and some samples may be left over.  Where
    all ranks shuffle the whole, Megatron's sampler gives them to its first ranks, if they are enough, in place of what
    would be theirs at the beginning of the next epoch.

    Args:
        total: samples of the data set.
        size: of a microbatch.
        ranks: data-parallel ones of the launch.
        sharded: whether each rank shuffles a part of its own (Megatron's default) or all shuffle the whole.
    """

    def __init__(self, total: int, size: int, ranks: int, *, sharded: bool) -> None:
        self._size = size
        self._ranks = ranks
        self._sharded = sharded
        self.round = size * ranks
        """Samples that all ranks together have with one microbatch each."""
        self.epoch = total // self.round * self.round
        """Samples of an epoch."""
        if not self.epoch:
            raise ValueError(f"{total} samples are not enough for one microbatch of {size} on each of {ranks} ranks")
        self._bucket = self.epoch // ranks if sharded else total // size * size
        self._shuffled = lru_cache(maxsize=2)(self._shuffle)

    def samples(self, first: int) -> list[int] | None:
        """See ``Order``."""
        epoch, at = divmod(first, self.epoch)
        begins, rank = at // self.round * self.round, at % self.round // self._size
        shuffled = self._shuffled(epoch)
        if self._sharded:
            place = begins // self._ranks
            return [rank * self._bucket + sample for sample in shuffled[place : place + self._size].tolist()]
        place = begins + rank
        if not begins and epoch:
            left = self._shuffled(epoch - 1)[self.epoch + rank :: self._ranks].tolist()
            if len(left) >= self._size:
                return list(left[: self._size])
        return list(shuffled[place : begins + self.round : self._ranks].tolist())

    def _shuffle(self, epoch: int) -> torch.Tensor:
        generator = torch.Generator()
        generator.manual_seed(epoch)
        return torch.randperm(self._bucket, generator=generator)


def to_skip() -> frozenset[int]:
    """The iterations, from 1, that this run leaves out."""
    args = get_args()
    return frozenset(iteration for iteration in args.iterations_to_skip or () if iteration <= args.train_iters)


def with_skipped(iteration: int, skipped: Iterable[int]) -> int:
    """How many iterations are over once ``iteration`` of them are: with those that are left out right after them."""
    left_out = frozenset(skipped)
    while iteration + 1 in left_out:
        iteration += 1
    return iteration


def skipped_before(iteration: int, begun: int, skipped: Iterable[int]) -> int:
    """How many iterations are left out right before ``iteration``, of a run that began after iteration ``begun``."""
    left_out = frozenset(skipped)
    found = 0
    while iteration - found - 1 > begun and iteration - found - 1 in left_out:
        found += 1
    return found


def install_skipping(loop: Loop) -> None:
    """Wrap the seam where Megatron reads the batch of an iteration that it leaves out.

    Microbatches are read by number (`data`): nobody asks for these.
    """
    loop.wrap("skipped_step", _unread)


def _unread(original: Callable[..., Any]) -> Callable[..., Any]:
    def dummy_train_step(data_iterator: Any) -> None:
        get_rerun_state_machine().current_iteration += 1  # by which Megatron names an iteration in its messages

    return dummy_train_step
