"""--use-distributed-optimizer: Megatron's optimizer, whose shards have shadows and whose update survives a death.

    the step is committed (instep.step): every holder has the sums of its units, and nothing else is needed of the dead
       |
    measure   the norm of each unit's gradients, over the replica's tensor and pipeline ranks; needs no other replica
       |
    section   exchange the units' norms over the column; then, once: Megatron's own step() clips and updates the pieces
       |        (owners and shadows alike) and copies them to the model; then the parameters are gathered (with
       |        --overlap-param-gather after it, while the next forward pass runs: ``instep.overlap``)
       |      revoked: again with whoever is left; who has updated does not do so twice, and the norm comes out bit for
       |        bit the same, since units, not workers, are summed up, and a shadow's sum is its owner's
       v
    all agree, and the next iteration begins

At the boundary before a step whose members are not those of the layout the state changes hands (``renew``).

Megatron's optimizer keeps its groups, its schedule, its clipping and its inner optimizer; what is replaced is which
tensors these work on (`fragments`), where the norm comes from, and the gathering of parameters.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import optimizer as optimizer_module
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.training import get_args

from recover_megatron.errors import UserError
from recover_megatron.instep.gradients import alive
from recover_megatron.instep.overlap import Overlap
from recover_megatron.instep.parameters import Parameters
from recover_megatron.instep.recovery import Recovery
from recover_megatron.instep.shards import Column, ElementRange
from recover_megatron.logger import get_logger
from recover_megatron.megatron_hooks import monkeypatch
from recover_megatron.megatron_hooks.buckets import Buckets
from recover_megatron.megatron_hooks.optimizer.host_shadows import HostShadows
from recover_megatron.megatron_hooks.optimizer.shard_fragments import ShardFragment, ShardFragments
from recover_megatron.megatron_hooks.optimizer.sharded_checkpoint import ShardedCheckpoint

log = get_logger(__name__)

REPARTITION_SECONDS = 600.0
"""How long the state may take to change hands, beyond the hang timeout, before who makes no mark counts as hung."""

_OVERRIDDEN = ("_copy_model_grads_to_main_grads", "_copy_main_params_to_model_params", "get_parameter_state_dp_zero",
               "sharded_param_state_dp_reshardable", "sharded_param_state_fully_reshardable")  # fmt: skip
_groups_of: WeakKeyDictionary[Any, dict[Any, int]] = WeakKeyDictionary()
"""Optimizer -> model parameter -> number of its group: only while it is made does Megatron know of all.  Gone with the
optimizer: a worker that builds another model has no room for the parameters of the one before."""


def install() -> None:
    """Wrap the seams; raises UserError if this Megatron's are not the ones we know.  Must come before the model's."""

    def noting(original: Callable[..., None]) -> Callable[..., None]:
        def __init__(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            groups = optimizer.param_groups if optimizer is not None else []
            _groups_of[self] = {
                parameter: number for number, group in enumerate(groups) for parameter in group["params"]
            }
            original(self, optimizer, *args, **kwargs)

        return __init__

    if missing := [name for name in _OVERRIDDEN if not callable(getattr(DistributedOptimizer, name, None))]:
        raise UserError(f"--recover: DistributedOptimizer of this Megatron has no {', '.join(missing)}")
    monkeypatch.wrap(DistributedOptimizer, "__init__", ("self", "optimizer", "config"), noting)


def groups_with_parameters(one: Any) -> list[dict[str, Any]]:
    """The inner optimizer's groups that have parameters of this model position, whoever updates them."""
    used = set(_groups_of[one].values())
    return [group for number, group in enumerate(one.optimizer.param_groups) if number in used]


class ShardedOptimizer:
    """The optimizer of one worker, all of Megatron's.  ``buckets``: with their shards.

    ``shadows``: how many copies of each part there are beside the owner's; ``shadow_device``: where, None: as its own.
    """

    def __init__(
        self, optimizer: Any, buckets: Buckets, recovery: Recovery, shadows: int, shadow_device: torch.device | None
    ) -> None:
        assert buckets.shards is not None
        self._optimizer = optimizer
        self._buckets = buckets
        self.shards = buckets.shards
        self._recovery, self._progress, self._assignment = recovery, recovery.progress, recovery.assignment
        self._tail = buckets.tail
        self._width = shadows + 1
        chained = getattr(optimizer, "chained_optimizers", [optimizer])
        self._fragments = [
            ShardFragments(one, self._buckets_of(one), _groups_of[one], shadow_device)
            for one in chained
            if not one.is_stub_optimizer
        ]
        self._parameters = Parameters(buckets.parameters, self.shards)
        device = buckets.parameters[0][1].device
        self._updated = 0
        self._shadows_elsewhere = shadow_device is not None and shadow_device.type != device.type
        self._aside = HostShadows(self._fragments, float(optimizer.config.clip_grad))
        self._overlap: Overlap | None = None
        if self._fragments and buckets.overlaps and shadow_device is None:
            self._overlap = Overlap(buckets.parameters, self.shards, recovery, self._lose)
        buckets.overlap = self._overlap
        self._zeros = bool(optimizer.config.log_num_zeros_in_grad)
        for one, fragments in zip((one for one in chained if not one.is_stub_optimizer), self._fragments, strict=True):
            one._copy_model_grads_to_main_grads = fragments.begin_update
            one._copy_main_params_to_model_params = fragments.end_update
            # Whoever is left writes; which instance it was in does not matter.
            one.data_parallel_group, one.distributed_optimizer_instance_id = self._buckets.whole(one), 0
            saved = ShardedCheckpoint(one, fragments, self._primary_fragments, self._primary_parts)
            one.get_parameter_state_dp_zero = saved.whole
            one.sharded_param_state_fully_reshardable = saved.in_model_space(one.sharded_param_state_fully_reshardable)
            one.sharded_param_state_dp_reshardable = saved.by_bucket(one.sharded_param_state_dp_reshardable)

    def _buckets_of(self, one: Any) -> dict[int, Any]:
        return {self._buckets.number(bucket): bucket for buffer in one.buffers for bucket in buffer.buckets}

    # ---- who holds what

    def adopt(self) -> None:
        """At launch: the shards are as Megatron made them, or read them from a checkpoint.

        Where nothing has been updated yet all state follows from the parameters, which all have: then the shadows are
        there at once.  What came from a checkpoint changes hands before the first step.
        """
        self.shards.adopt()
        for fragments in self._fragments:
            (own,) = self.shards.held(self._column(fragments))
            fragments.adopt(own, self._parts(fragments, own, {}))
        if get_args().iteration > 0:  # the same on all, however little of the state one may have
            return
        layouts = {column: self.shards.wanted(column) for column in self.shards.columns}
        for fragments in self._fragments:
            fragments.install(self._make(fragments, layouts))
        self.shards.take_up(layouts)

    def forget(self) -> None:
        """This worker has lost its place, or never had one: what it holds is of no use."""
        self.shards.forget()
        self._aside.join()
        for fragments in self._fragments:
            fragments.install({})
        if self._overlap is not None:
            self._overlap.forget()

    def check(self) -> None:
        """Raise ``StateLost``, for all, where nobody has a part of the optimizer's state any more."""
        if units := self.shards.lost():
            self._lose(*units)

    def _lose(self, *units: int) -> None:
        names = ", ".join(map(str, units))
        whose = "workers" if self._buckets.instances == 1 else "shards"
        self._recovery.planner.lose_state(f"the optimizer state of {whose} {names} had no other copy")

    def complete(self) -> None:
        """See to it that the model and the shadows are those of the last update: who reads them next does not ask."""
        self._aside.join()
        if self._overlap is not None:
            self._overlap.complete_all()

    @property
    def updated(self) -> int:
        """The iteration of the last update."""
        return self._updated

    def due(self) -> bool:
        """Whether state must change hands before the next step: not yet where somebody takes a place with that step."""
        return self.shards.stale() and not self._recovery.boundary.joining_next

    def renew(self) -> None:
        """Have the state change hands, for who is there now; a section: all or nobody."""
        self.complete()
        recovery, shards = self._recovery, self.shards
        layouts: dict[Column, Any] = {}
        held: list[dict[int, list[ShardFragment]]] = []
        began, came = time.monotonic(), 0

        def run() -> None:
            nonlocal came
            self._progress.inject("repartition")
            self._progress.mark("repartition", waiting=True, allow=REPARTITION_SECONDS)
            layouts.clear()
            layouts.update({column: shards.wanted(column) for column in shards.columns})
            held[:] = [self._make(fragments, layouts) for fragments in self._fragments]
            came = shards.exchange(
                self._assignment.epoch_groups,
                self._element_ranges(layouts),
                self._give,
                lambda element_ranges, tree: self._take(element_ranges, tree, held),
                lambda: self._progress.mark("repartition", waiting=True, allow=REPARTITION_SECONDS),
            )
            self._progress.inject("repartition")

        recovery.sections.run("repartition", run)
        for fragments, its in zip(self._fragments, held, strict=True):
            fragments.install(its)
        shards.take_up(layouts)
        seconds, epoch = round(time.monotonic() - began, 6), self._assignment.decision.epoch
        recovery.hooks.log("repartition", epoch=epoch, seconds=seconds, bytes=came)
        self.check()

    def verify(self) -> None:
        """Compare the shadows with what they are shadows of; where one differs, all are made anew, by all workers."""
        recovery, shards = self._recovery, self.shards
        self._aside.join()
        if self._shadows_elsewhere:
            return  # another kind of processor rounds otherwise: they differ from the start
        mine = [
            number
            for optimizer, fragments in enumerate(self._fragments)
            for unit in shards.held(self._column(fragments))
            for number in (optimizer, min(self._column(fragments)), unit, fragments.digest(unit).value)
        ]

        def run() -> tuple[list[int], bool]:
            self._progress.mark("verify", waiting=True)
            ring = self._assignment.epoch_groups.ring(alive(self._tail, self._assignment.live))
            found = differing(ring.exchange(mine))
            return found, self._assignment.epoch_groups.any(bool(found), tuple(sorted(self._assignment.live)))

        different, anywhere = recovery.sections.run("verify shadows", run)
        if different:
            recovery.hooks.log("shadows differ", units=different)
            log.info(f"the shadows of workers {different} differ from what they are copies of: all are made anew")
        if anywhere:
            shards.distrust_shadows()

    def _make(self, fragments: ShardFragments, layouts: Mapping[Column, Any]) -> dict[int, list[ShardFragment]]:
        me, (column, _) = self._assignment.me, self._buckets.part(next(iter(fragments.buckets)))
        return {
            unit: fragments.make(unit, self._parts(fragments, unit, layouts), shadow=place > 0)
            for place, unit in enumerate(layouts[column].held(me))
        }

    def _parts(
        self, fragments: ShardFragments, unit: int, layouts: Mapping[Column, Any]
    ) -> dict[int, Sequence[tuple[int, int]]]:
        """What a unit owns of each bucket that these pieces are of."""
        found = {}
        for number in fragments.buckets:
            column, numel = self._buckets.part(number)
            found[number] = layouts.get(column, self.shards.layout(column)).parts(unit, numel)
        return found

    def _element_ranges(self, layouts: Mapping[Column, Any]) -> dict[tuple[int, int], list[ElementRange]]:
        element_ranges: dict[tuple[int, int], list[ElementRange]] = {}
        for fragments in self._fragments:
            for number in fragments.buckets:
                column, numel = self._buckets.part(number)
                for move in self.shards.moves(column, layouts[column], numel):
                    element_range = ElementRange(number, move.start, move.stop)
                    element_ranges.setdefault((move.source, move.target), []).append(element_range)
        return element_ranges

    def _give(self, element_ranges: Sequence[ElementRange]) -> list[Any]:
        return [self._fragments_of(element_range).give([element_range]) for element_range in element_ranges]

    def _take(
        self, element_ranges: Sequence[ElementRange], tree: list[Any], held: list[dict[int, list[ShardFragment]]]
    ) -> None:
        for element_range, its in zip(element_ranges, tree, strict=True):
            for fragments, units in zip(self._fragments, held, strict=True):
                if element_range.bucket in fragments.buckets:
                    fragments.take([element_range], its, [fragment for unit in units.values() for fragment in unit])

    def _fragments_of(self, element_range: ElementRange) -> ShardFragments:
        return next(fragments for fragments in self._fragments if element_range.bucket in fragments.buckets)

    def _column(self, fragments: ShardFragments) -> Column:
        return self._buckets.part(next(iter(fragments.buckets)))[0]

    def _primary_fragments(self, fragments: ShardFragments) -> Iterator[ShardFragment]:
        column = self._column(fragments)
        return (p for unit, its in fragments.held.items() if self.shards.speaks_for(column, unit) for p in its)

    def primaries(self) -> Iterator[tuple[ShardFragments, Iterator[ShardFragment]]]:
        """Of each of Megatron's optimizers what is held here, and the pieces of it for which this worker speaks."""
        self._aside.join()
        return ((fragments, self._primary_fragments(fragments)) for fragments in self._fragments)

    def _primary_parts(self, fragments: ShardFragments, number: int) -> list[tuple[int, int]]:
        column, numel = self._buckets.part(number)
        layout = self.shards.layout(column)
        units = [unit for unit in self.shards.held(column) if self.shards.speaks_for(column, unit)]
        return sorted(part for unit in units for part in layout.parts(unit, numel))

    # ---- the update

    def step(self, original: Callable[[], Any]) -> Any:
        """Megatron's ``optimizer.step()``, ``original``, within the section that makes it survive; what it returns."""
        recovery, parameters, overlap = self._recovery, self._parameters, self._overlap
        sums = self._measure()
        parameters.begin()
        self.complete()
        if overlap is not None:
            overlap.withdraw()
        done: list[Any] = []
        begun = False

        def run() -> None:
            nonlocal begun
            self._progress.inject("norm")
            self._progress.mark("norm", waiting=True)
            norm, zeros, again = self._exchange(sums, begun)
            if not done:
                self._progress.inject("update")
                done.append(self._update(original, norm, zeros))
                self._progress.inject("update")
            if overlap is not None:
                overlap.publish(self._progress.at)
                return
            self._speak_for_the_lost()
            self._progress.mark("param-gather", waiting=True)
            begun = True
            parameters.gather(self._assignment.epoch_groups, self._assignment.live, again=again)

        self._updated = recovery.hooks.iteration()
        recovery.sections.run("update", run)
        if overlap is not None:
            with self._progress.waiting("param-gather"):
                overlap.start(self._progress.at)
        return done[0]

    def _update(self, original: Callable[[], Any], norm: float, zeros: float) -> Any:
        top = self._optimizer
        self._aside.begin(norm)
        with ExitStack() as replaced:
            replaced.enter_context(monkeypatch.replaced(optimizer_module, "get_grad_norm_fp32", lambda *_, **__: norm))
            replaced.enter_context(monkeypatch.replaced(top, "get_grad_norm", lambda: norm))
            replaced.enter_context(monkeypatch.replaced(top, "count_zeros", lambda: zeros))
            return original()

    def _speak_for_the_lost(self) -> None:
        """Where a shadow is the first live holder of a unit, its parameters are those that all will get."""
        for fragments in self._fragments:
            column = self._column(fragments)
            for unit in self.shards.held(column):
                if any(fragment.aside for fragment in fragments.held[unit]) and self.shards.speaks_for(column, unit):
                    self._aside.join()
                    fragments.show_aside(unit)

    def _measure(self) -> torch.Tensor:
        """[column, place in what I hold of it, (sum of squares, zeros)] over the replica's model-parallel ranks."""
        columns = self.shards.columns
        device = self._buckets.parameters[0][1].device
        sums = torch.zeros(len(columns), self._width, 2, dtype=torch.float64, device=device)
        for at, column in enumerate(columns):
            for place, unit in enumerate(self.shards.held(column)):
                for fragments in self._fragments:
                    if unit in fragments.held and self._column(fragments) == column:
                        sums[at, place] += fragments.sums(unit, zeros=self._zeros)
        group = parallel_state.get_model_parallel_group()
        if group.size() > 1:
            dist.all_reduce(sums, group=group)
        return sums.cpu()

    def _exchange(self, sums: torch.Tensor, begun: bool) -> tuple[float, float, bool]:
        """(norm, zeros, whether anybody may hold gathered parameters), the same on all workers of all columns.

        A row has for each held unit: the unit, whether this worker speaks for it, and its sums.
        """
        shards = self.shards
        row = [float(begun)]
        for at, column in enumerate(shards.columns):
            held = shards.held(column)
            for place in range(self._width):
                unit = held[place] if place < len(held) else -1
                speaks = unit >= 0 and shards.speaks_for(column, unit)
                row += [float(unit), float(speaks), *sums[at, place].tolist()]
        rows = self._assignment.epoch_groups.ring(alive(self._tail, self._assignment.live)).exchange_doubles(row)
        found: list[tuple[float, float]] = []
        for its in rows:
            for at in range(1, len(its), 4):
                if its[at + 1]:
                    found.append((its[at + 2], its[at + 3]))
        # Exactly rounded sums: they do not depend on who told what.
        total, count = (math.fsum(numbers) for numbers in zip(*found, strict=True))
        return math.sqrt(total), count, any(its[0] for its in rows)


def differing(rows: Sequence[Sequence[int]]) -> list[int]:
    """The units of which two holders tell different digests.

    A row is what one worker holds, four numbers each: the optimizer, its column's first slot, the unit, the digest.  (A
    worker need not be in the column of another one's experts.)
    """
    told: dict[tuple[int, int, int], set[int]] = {}
    for row in rows:
        for optimizer, column, unit, digest in zip(*(row[at::4] for at in range(4)), strict=True):
            told.setdefault((optimizer, column, unit), set()).add(digest)
    return sorted({unit for (_, _, unit), digests in told.items() if len(digests) > 1})
