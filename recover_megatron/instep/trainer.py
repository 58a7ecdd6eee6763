"""Input and result of a step: ``Trainer`` with its ``Gradients`` and ``Tail``, and ``Outcome``.

Path of the gradient and parameter buckets through the rings:

    buffers --(compute)--> LOCAL --submit, in one order--> rings --wait--> REDUCED --(commit)--> the optimizer
                             ^                                                 |
                             '------ re-run: REDUCED spans saved, restored ----'

With the distributed optimizer (``Shards``) the ring stops after the reduce-scatter: a sum is REDUCED only at workers
that hold the part of the optimizer state which the sum updates, and all other workers keep their own gradient.  After a
death a pull copies every sum that is REDUCED at some member to all members, as without the distributed optimizer.
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
    """Gradient buckets of this worker, in the order in which every worker of their columns submits them.

    ``parts``: (column, flat tensor) of each bucket.  ``shards``: with the distributed optimizer, the parts of the sum
    that each worker needs (its own, and those that it shadows); None: every worker needs the complete sum.  ``memory``:
    memory in which sums are saved.
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
        """Begin a new iteration: everything is LOCAL."""
        self.hold()
        for _, bucket in self._parts:
            bucket.ledger.clear()

    def stream(self, epoch_groups: EpochGroups, live: frozenset[int]) -> None:
        """Sum each bucket from now on as soon as this and all earlier buckets are ready (--overlap-grad-reduce)."""
        self.hold()
        self._stream = epoch_groups, live

    def hold(self) -> None:
        """Submit no bucket until ``reduce``.

        No sum may be under way: the caller has waited for all submitted buckets, or their epoch has ended.
        """
        self._stream = None
        self._ready = [False] * len(self._parts)
        self._handles, self._next = [], 0

    @property
    def submitted(self) -> bool:
        """True if other workers may hold a sum with gradients of this worker's present pass."""
        return self._next > 0

    def ready(self, number: int) -> None:
        """Record that bucket ``number`` has all gradients of this pass; called during the backward pass."""
        self._ready[number] = True
        if self._stream is None:
            return
        while self._next < len(self._parts) and self._ready[self._next]:
            try:
                self._submit(*self._stream)
            except EpochRevoked:
                self._stream = None  # raised again where the step reduces; until then this replica continues computing
                return

    def reduce(self, epoch_groups: EpochGroups, live: frozenset[int], tail: Tail) -> None:
        """Sum all LOCAL spans, the tail last; afterwards they are REDUCED.  Raises ``EpochRevoked``.

        With ``shards`` a span is REDUCED only at the workers that need it.
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
        """Return copies of the REDUCED spans, since lost microbatches will be run into the same buffers."""
        kept: list[SavedSums] = []
        for _, bucket in self._parts:
            kept.append(bucket.save_sums(self._memory, sum(saved.device_bytes for saved in kept)))
        return kept

    def divide_local(self, number: int, factor: float) -> None:
        """Divide the LOCAL spans of bucket ``number`` by ``factor``, between two epochs."""
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
    """Return the slots of a column that have a place in the epoch, in the column's order."""
    return tuple(worker for worker in column if worker in live)


EXTRAS = 64
"""Greatest number of losses and token counts in the tail."""


class Tail:
    """The bucket that is summed last, over the ring of the dense parameters, float64, flat.

    [count of id 0..total-1 | replica+1 of id 0..total-1 | seconds per microbatch of each replica | extras]

    It is the audit: a step is committed only if every id was counted exactly once, and the counts in steps.jsonl come
    from the sum, not from the plan.  ``replicas``: the number of replicas at launch.

    The size is the same at all members from the start, since a recovery may compare ledgers before any worker has
    filled it.  ``extras``: ``room`` numbers that are summed over the column (losses, tokens).
    """

    def __init__(self, column: Column, total: int, replicas: int, device: torch.device, *, room: int = EXTRAS) -> None:
        self.column = column
        self.total = total
        self._room = room
        self._seconds_at = 2 * total
        self._extras_at = 2 * total + replicas
        self.bucket = Bucket(torch.zeros(self._extras_at + room, dtype=torch.float64, device=device))

    def fill(self, replica: int, ids: Sequence[int], extras: torch.Tensor, share: float, seconds: float = 0.0) -> None:
        """Set this worker's contribution: the ids of all that it ran, and its extras (float64, flat, at most ``room``).

        ``share``: 1 / number of workers of this column in one replica, so that their counts add up to one.
        ``seconds``: seconds per microbatch in the main pass.  Spans that are REDUCED already are not touched.
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
        """Return, from the finished sum, replica -> ids of the microbatches that it ran.

        Raises Disagreement unless every id was counted exactly once.
        """
        counts, replicas = self.bucket.flat[: 2 * self.total].cpu().view(2, -1).round(decimals=6).tolist()
        wrong = {j: count for j, count in enumerate(counts) if count != 1}
        if wrong:
            raise Disagreement(f"of {self.total} microbatches some were not counted exactly once: {wrong}")
        counted: dict[int, list[int]] = {}
        for j, replica in enumerate(replicas):
            counted.setdefault(round(replica) - 1, []).append(j)
        return dict(sorted(counted.items()))

    @property
    def extras(self) -> torch.Tensor:
        """The sums of the extras, float64, on the host."""
        return self.bucket.flat[self._extras_at :].cpu()

    @property
    def seconds(self) -> dict[int, float]:
        """Replica -> seconds per microbatch, for replicas that reported it."""
        means = self.bucket.flat[self._seconds_at : self._extras_at].tolist()
        return {replica: seconds for replica, seconds in enumerate(means) if seconds > 0}


class Trainer(Protocol):
    """Interface of the training framework: a step calls it to run microbatches."""

    @property
    def gradients(self) -> Gradients:
        """The buckets."""

    def compute(self, ids: Sequence[int], *, again: bool) -> None:
        """Run these microbatches forward and backward and add their gradients to the buckets, summing nothing.

        ``ids``: for this worker's inner rank.  ``again``: True if an earlier call of this step has added gradients.
        """

    def settle(self) -> None:
        """Bring the gradients into the buckets after ``compute`` (extra main gradients are copied into them)."""

    def extras(self) -> torch.Tensor:
        """Return losses and counts of all ``compute`` calls of this step, to be summed over the column; float64."""


@dataclass
class Outcome:
    """Result of a committed step: the microbatches that it counted, and the cost of its recovery, if there was one."""

    counted: dict[int, list[int]]
    """Replica -> ids of the microbatches that it ran, from the tail's sum."""
    extras: torch.Tensor
    reran: dict[int, list[int]] = field(default_factory=dict)
    """Replica -> ids that it ran in place of a lost replica."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of the recovery by phase (rendezvous, regroup, pull, rerun, reduce, agree), since this worker joined the
    recovery; empty if there was no recovery."""
    saved_bytes: int = 0
    """Peak device and host memory of the finished sums that were saved during a re-run."""
    speeds: dict[int, float] = field(default_factory=dict)
    """Replica -> seconds per microbatch of its main pass, the same on all workers of a column."""
    by_plan: bool = False
    """True if this worker learnt of the commit from the plan of a later epoch."""


class Parameters:
    """Model parameters after a sharded update: every worker gets the values that the primaries have updated.

        updated --gather--> each part from its primary, over the ring --all have agreed--> complete
           ^                        |
           '---- epoch revoked -----'     pull: parts that arrived anywhere are final; the rest comes from the new
                                          primary, the shadow of a lost owner, which has done the same update

    ``parts``: (column, flat tensor) of each bucket, in the order of the gradients' buckets.
    """

    def __init__(self, parts: Sequence[tuple[Column, torch.Tensor]], shards: Shards) -> None:
        self._parts = [(column, Bucket(tensor)) for column, tensor in parts]
        self._shards = shards

    def begin(self) -> None:
        """Begin an update: nothing has been gathered."""
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
