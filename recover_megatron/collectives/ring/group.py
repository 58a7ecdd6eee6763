"""The ring as a group: plans each collective and hands it to the progress thread."""

from __future__ import annotations

import zlib
from collections.abc import Hashable
from dataclasses import dataclass

import torch

from recover_megatron.collectives.epoch import CancelToken, Epoch
from recover_megatron.collectives.group import BucketCollective, Group
from recover_megatron.collectives.memo import Memo
from recover_megatron.collectives.ring.executor import Hook, Parts, Ring, RingTask, parts_of
from recover_megatron.collectives.ring.progress import Handle, ProgressThread
from recover_megatron.collectives.ring.schedule import Chunks, Program, frozen, most_partials, plan, segment_length
from recover_megatron.collectives.transport.interface import Transport


@dataclass(frozen=True)
class Tuning:
    """How buckets are cut; the same on all members.  Measured with benchmarks/bench_ring.py."""

    segment_bytes: int = 512 << 10
    """The longest segment."""
    least_bytes: int = 128 << 10
    """No segment is made shorter than this only to have several under way."""
    depth: int = 2
    """Blocks under way at a time; see ``schedule``."""
    cut_bytes: int = 1
    """Cuts are at multiples of it, where the spans begin at such."""

    @classmethod
    def over_nccl(cls) -> Tuning:
        """Every segment costs the host two calls and a launch, and NCCL is fast with whole lines of 128 bytes.

        By estimate: not measured, no GPU was there.
        """
        return cls(segment_bytes=32 << 20, least_bytes=16 << 20, cut_bytes=128)

    @property
    def slots(self) -> int:
        """Segments that one member has room for: all partial sums that it may hold, and one that arrives."""
        return most_partials(self.depth) + 1


@dataclass(frozen=True, slots=True)
class _Planned:
    """A program, and what tells whether all members have the same."""

    program: Program
    signature: int


MOST_MESSAGES = 1 << 17
"""Limit of the programs that a group remembers, in messages: some 20 MiB."""


@dataclass(frozen=True, slots=True)
class _Views:
    """Parts of ``flat``, which they keep alive: no other tensor has its ``id``."""

    flat: torch.Tensor
    parts: Parts


class RingGroup(Group):
    """Use ``open_group`` of ``opening``."""

    def __init__(
        self,
        epoch: Epoch,
        cancel_token: CancelToken,
        transport: Transport,
        *,
        device: torch.device | None = None,
        tuning: Tuning | None = None,
        hook: Hook | None = None,
    ) -> None:
        super().__init__(epoch, cancel_token, device or torch.device("cpu"))
        self.tuning = tuning or Tuning()
        self.cut_bytes = self.tuning.cut_bytes
        self._transport = transport
        self._planned: Memo[_Planned] = Memo(
            MOST_MESSAGES, lambda planned: len(planned.program.sends) + len(planned.program.receives)
        )
        self._views: Memo[_Views] = Memo(MOST_MESSAGES, lambda views: sum(map(len, views.parts)))
        self._ring = Ring(transport, hook)
        self._progress: ProgressThread[RingTask] = ProgressThread(
            self._ring, cancel_token, f"ring of epoch {self.epoch}"
        )

    @property
    def scratch_peak(self) -> int:
        """The most bytes of scratch that the group ever had, over all buckets."""
        return self._ring.scratch_peak

    def close(self) -> None:
        self._progress.close()

    def segment_elements(self, chunks: Chunks, element_size: int) -> int:
        """Elements of a segment for ``chunks``."""
        tuning = self.tuning
        most, least = max(1, tuning.segment_bytes // element_size), tuning.least_bytes // element_size
        return segment_length(chunks, most, least, tuning.depth, self._cut(element_size))

    def _cut(self, element_size: int) -> int:
        return max(1, self.tuning.cut_bytes // element_size)

    def _start(self, collective: BucketCollective) -> Handle:
        its, flat, what = collective, collective.flat, collective.what
        gather_hops = max(its.to, default=0)  # a ring gives it to all in between
        key = what, flat.dtype, its.reduce, gather_hops, frozen(its.chunks)
        planned = self._planned.get(key, lambda: self._plan(what, flat.dtype, its.chunks, its.reduce, gather_hops))
        run = RingTask(
            flat,
            its.ledger,
            planned.program,
            *self._parts(what, flat, key, planned.program),
            tag=planned.signature,
            epoch_of=its.epoch_of or (lambda _: self.epoch),
            final=its.final,
            token=self._transport.submitted(),
            stored="gather" if what == "all-gather" else "store",
        )
        return self._progress.submit(run)

    def _parts(self, what: str, flat: torch.Tensor, key: Hashable, program: Program) -> Parts:
        """Those of gradients are remembered, with the bucket: the next iteration wants the same."""
        if what != "reduce":
            return parts_of(flat, program)
        return self._views.get((id(flat), key), lambda: _Views(flat, parts_of(flat, program))).parts

    def _plan(self, what: str, dtype: torch.dtype, chunks: Chunks, reduce: bool, gather_hops: int) -> _Planned:
        length = self.segment_elements(chunks, dtype.itemsize)
        program = plan(
            self.rank,
            chunks,
            length,
            reduce=reduce,
            gather_hops=gather_hops,
            depth=self.tuning.depth,
            cut=self._cut(dtype.itemsize),
        )
        signature = f"{what} {dtype} {reduce} {gather_hops} {length} {frozen(chunks)}"
        return _Planned(program, zlib.crc32(signature.encode()))
