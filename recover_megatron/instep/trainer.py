"""Input of a step (``Trainer``, ``Gradients`` and ``Tail``), its result (``Outcome``), and updated ``Parameters``.

Path of the gradient buckets through the rings:

    buffers --(compute)--> LOCAL --submit in fixed order-> rings --wait--> REDUCED --(commit)--> the optimizer
                             ^                                                 |
                             '---- re-run: REDUCED spans saved, then restored -'

With the distributed optimizer (``Shards``) the ring only reduce-scatters.  A sum is then REDUCED only at the workers
that update their optimizer state with it; all other workers keep their own gradient.  After a death, with or without
the distributed optimizer, a pull copies every sum that is REDUCED at some member to all members.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from recover_megatron.collectives.epoch import EpochRevoked
from recover_megatron.collectives.ledger import Bucket, Memory, SavedSums
from recover_megatron.collectives.progress import Handle
from recover_megatron.errors import Disagreement
from recover_megatron.instep.groups.epoch_groups import EpochGroups
from recover_megatron.instep.state.shards import Shards
from recover_megatron.workload.grid import Column


class Gradients:
    """Gradient buckets of one worker, in the order in which all workers of their columns submit them.

    ``parts``: (column, flat tensor) of each bucket.  ``shards``: with the distributed optimizer, names the workers that
    need each part of a sum; None: every worker needs the complete sum.  ``memory``: memory in which sums are saved.
    """

    def __init__(
        self, parts: Sequence[tuple[Column, torch.Tensor]], shards: Shards | None = None, memory: Memory | None = None
    ) -> None:
        self._memory = memory or Memory()
        self._parts = [(column, Bucket(tensor)) for column, tensor in parts]
        self._shards = shards
        self._ready = [False] * len(parts)
        self._handles: list[Handle] = []
        self._next = 0
        self._stream: tuple[EpochGroups, frozenset[int]] | None = None

    @property
    def columns(self) -> list[Column]:
        return list(dict.fromkeys(column for column, _ in self._parts))

    def begin(self) -> None:
        """Begin a new iteration: mark all spans of all buckets LOCAL."""
        self.hold()
        for _, bucket in self._parts:
            bucket.ledger.clear()

    def stream(self, epoch_groups: EpochGroups, live: frozenset[int]) -> None:
        """Begin to submit each bucket as soon as it and all earlier buckets are ready (--overlap-grad-reduce)."""
        self.hold()
        self._stream = epoch_groups, live

    def hold(self) -> None:
        """Submit no bucket until ``reduce`` is called.

        The caller must have waited for all submitted buckets, unless their epoch has ended.
        """
        self._stream = None
        self._ready = [False] * len(self._parts)
        self._handles, self._next = [], 0

    @property
    def submitted(self) -> bool:
        """True if gradients of this worker's present pass may be in a sum of another worker."""
        return self._next > 0

    def ready(self, number: int) -> None:
        """Record that bucket ``number`` has all gradients of the present pass; called during the backward pass."""
        self._ready[number] = True
        if self._stream is None:
            return
        while self._next < len(self._parts) and self._ready[self._next]:
            try:
                self._submit(*self._stream)
            except EpochRevoked:
                self._stream = None  # ``reduce`` raises the error again; until then this replica computes
                return

    def reduce(self, epoch_groups: EpochGroups, live: frozenset[int], tail: Tail) -> None:
        """Sum all LOCAL spans of the buckets, the tail last, and mark them REDUCED.  Raises ``EpochRevoked``.

        With ``shards`` a span becomes REDUCED only at the workers that need its sum.
        """
        if self._stream is None:
            self.hold()
        while self._next < len(self._parts):
            self._submit(epoch_groups, live)
        self._stream = None
        self._handles.append(epoch_groups.ring(alive(tail.column, live)).all_reduce(tail.bucket))
        for handle in self._handles:
            handle.wait()
        self.hold()

    def pull(self, epoch_groups: EpochGroups, live: frozenset[int], tail: Tail) -> None:
        """Copy to this worker every sum that is REDUCED at some member of its column.  Raises ``EpochRevoked``."""
        for column in dict.fromkeys([*self.columns, tail.column]):
            buckets = [bucket for key, bucket in self._parts if key == column]
            if column == tail.column:
                buckets.append(tail.bucket)
            epoch_groups.ring(alive(column, live)).pull(buckets)

    def save_sums(self) -> list[SavedSums]:
        """Return copies of the REDUCED spans, to be restored after lost microbatches have changed the same buffers."""
        kept: list[SavedSums] = []
        for _, bucket in self._parts:
            kept.append(bucket.save_sums(self._memory, sum(saved.device_bytes for saved in kept)))
        return kept

    def divide_local(self, number: int, factor: float) -> None:
        """Divide the LOCAL spans of bucket ``number`` by ``factor``; no sum may be under way."""
        bucket = self._parts[number][1]
        with torch.no_grad():
            for span in bucket.ledger.local:
                bucket.flat[span.start : span.stop] /= factor

    def _submit(self, epoch_groups: EpochGroups, live: frozenset[int]) -> None:
        column, bucket = self._parts[self._next]
        ring = epoch_groups.ring(alive(column, live))
        if self._shards is None:
            handle = ring.all_reduce(bucket)
        else:
            spans, hops = self._shards.cut(column, bucket.ledger.numel)
            handle = ring.reduce_scatter(bucket, spans, shadows=hops)
        self._handles.append(handle)
        self._next += 1


def alive(column: Column, live: frozenset[int]) -> Column:
    """Return the slots of ``column`` that are in ``live``, in the column's order."""
    return tuple(worker for worker in column if worker in live)


EXTRAS = 64
"""Greatest number of losses and token counts in the tail (default of ``room`` in ``Tail``)."""


class Tail:
    """Bucket with counts and losses (float64, flat); summed after all other buckets, over the dense parameters' ring.

    [count of id 0..total-1 | replica+1 of id 0..total-1 | seconds per microbatch of each replica | extras]

    A step is committed only if this sum counts every microbatch id exactly once.  The counts in steps.jsonl come from
    the sum, too.  ``replicas``: the number of replicas at launch.

    All members must create tails of the same size, since a recovery may compare their ledgers before any worker has
    called ``fill``.  ``extras``: ``room`` numbers that are summed over the column (losses, tokens).
    """

    def __init__(self, column: Column, total: int, replicas: int, device: torch.device, *, room: int = EXTRAS) -> None:
        self.column = column
        self.total = total
        self._room = room
        self._seconds_at = 2 * total
        self._extras_at = 2 * total + replicas
        self.bucket = Bucket(torch.zeros(self._extras_at + room, dtype=torch.float64, device=device))

    def fill(self, replica: int, ids: Sequence[int], extras: torch.Tensor, share: float, seconds: float = 0.0) -> None:
        """Write this worker's ids, extras and duration to the LOCAL spans of the tail, and leave REDUCED spans
        unchanged.

        ``ids``: the microbatches that ``replica`` ran.  ``extras``: float64, flat, at most ``room`` numbers.
        ``share``: 1 / (number of workers that this column has in each replica), so that the counts of these workers add
        up to one.
        ``seconds``: seconds per microbatch in the main pass.  Raises ValueError for too many extras.
        """
        if extras.numel() > self._room:
            raise ValueError(f"the step has {extras.numel()} numbers to log, but the tail has room for {self._room}")
        flat = torch.zeros(self._extras_at + self._room, dtype=torch.float64)
        where = torch.tensor(list(ids), dtype=torch.int64)
        flat[where] = share
        flat[self.total + where] = share * (replica + 1)
        flat[self._seconds_at + replica] = share * seconds
        flat[self._extras_at : self._extras_at + extras.numel()] = extras
        saved = self.bucket.save_sums()
        self.bucket.flat.copy_(flat)
        saved.restore()

    def verify(self) -> dict[int, list[int]]:
        """Return replica -> ids of the microbatches that this replica ran, as the finished sum counts them.

        Raises Disagreement unless every id was counted exactly once.
        """
        counts, replicas = self.bucket.flat[: 2 * self.total].cpu().view(2, -1).round(decimals=6).tolist()
        wrong = {j: count for j, count in enumerate(counts) if count != 1}
        if wrong:
            raise Disagreement(f"some of {self.total} microbatches were not counted exactly once (id: count): {wrong}")
        counted: dict[int, list[int]] = {}
        for j, replica in enumerate(replicas):
            counted.setdefault(round(replica) - 1, []).append(j)
        return dict(sorted(counted.items()))

    @property
    def extras(self) -> torch.Tensor:
        """Sums of the extras (losses, tokens) over the column: float64, on the host."""
        return self.bucket.flat[self._extras_at :].cpu()

    @property
    def seconds(self) -> dict[int, float]:
        """Replica -> seconds per microbatch, for replicas that reported a duration."""
        means = self.bucket.flat[self._seconds_at : self._extras_at].tolist()
        return {replica: seconds for replica, seconds in enumerate(means) if seconds > 0}


class Trainer(Protocol):
    """Interface that the training framework implements: a step calls it to run microbatches."""

    @property
    def gradients(self) -> Gradients:
        """Gradient buckets of this worker."""

    def compute(self, ids: Sequence[int], *, again: bool) -> None:
        """Run microbatches forward and backward, and add their gradients to the buckets, without any sum over replicas.

        ``ids``: the microbatches of this worker's inner rank.  ``again``: True if an earlier call of this step has
        added gradients.
        """

    def finish_pass(self) -> None:
        """Finish the pass after ``compute``: copy gradients outside the buckets (extra main gradients) into the
        buckets."""

    def extras(self) -> torch.Tensor:
        """Return losses and token counts of all ``compute`` calls of this step, as float64; a step sums them over the
        column."""


@dataclass
class Outcome:
    """Result of a committed step: the microbatches that it counted, and the cost of its recovery, if there was one."""

    counted: dict[int, list[int]]
    """Replica -> ids of the microbatches that this replica ran, as the tail's sum counts them."""
    extras: torch.Tensor
    reran: dict[int, list[int]] = field(default_factory=dict)
    """Replica -> ids of lost microbatches that this replica ran."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Recovery phase (rendezvous, regroup, pull, rerun, reduce, agree) -> seconds that this worker spent in it; empty
    if there was no recovery."""
    saved_bytes: int = 0
    """Peak bytes, on device and host, of the finished sums that were saved during a re-run."""
    speeds: dict[int, float] = field(default_factory=dict)
    """Replica -> seconds per microbatch in the replica's main pass; equal on all workers of a column."""
    by_plan: bool = False
    """True if this worker learnt of the commit from the plan of a later epoch."""


class Parameters:
    """Model parameters after a sharded update: all workers gather the parts that the primaries have updated.

        updated --gather--> each part from its primary, over the ring --all have agreed--> complete
           ^                        |
           '---- epoch revoked -----'     pull: parts that some worker has received are copied to all; all other parts
                                          of a lost primary come from a shadow, which has done the same update

    ``parts``: (column, flat tensor) of each bucket, in the order of the gradients' buckets.
    """

    def __init__(self, parts: Sequence[tuple[Column, torch.Tensor]], shards: Shards) -> None:
        self._parts = [(column, Bucket(tensor)) for column, tensor in parts]
        self._shards = shards

    def begin(self) -> None:
        """Begin an update: mark all parts as not gathered yet."""
        for _, bucket in self._parts:
            bucket.ledger.clear()

    def gather(self, epoch_groups: EpochGroups, live: frozenset[int], *, again: bool) -> None:
        """Send every part to all members; afterwards the parameters are complete.  Raises ``EpochRevoked``.

        ``again``: True if some worker may hold parts that were gathered in an earlier epoch; all members must pass the
        same value.
        """
        if again:
            for column in dict.fromkeys(column for column, _ in self._parts):
                epoch_groups.ring(alive(column, live)).pull([bucket for key, bucket in self._parts if key == column])
        handles = []
        for column, bucket in self._parts:
            spans, _ = self._shards.cut(column, bucket.ledger.numel)
            handles.append(epoch_groups.ring(alive(column, live)).all_gather(bucket, spans, missing=True))
        for handle in handles:
            handle.wait()
