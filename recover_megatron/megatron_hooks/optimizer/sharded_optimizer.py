"""--use-distributed-optimizer: Megatron's optimizer, with shadows of its shards and an update that survives a death.

A unit is a share of the state: it has one owner, and shadows on other workers.  A piece is the part of a unit that lies
in one parameter.

    the step is committed (instep.step): every worker has the gradient sums of the units that it holds, so nothing else
       |                                 is needed from a dead worker
    measure   compute the norm of each unit's gradients, over the replica's tensor and pipeline ranks only
       |
    section   exchange the units' norms over the column.  Then Megatron's own step() clips and updates the pieces (of
       |        owners and shadows), and copies them to the model.  Then the parameters are gathered (with
       |        --overlap-param-gather after the section, while the next forward pass runs: ``instep.state.overlap``)
       |      If the epoch is revoked, the survivors repeat the section, but each worker updates only once.  The norm is
       |        then the same to the bit, since it is a sum over units, and a shadow's sum equals the owner's sum
       v
    all workers agree, and the next iteration begins

If the workers of the next step differ from the workers of the layout, the state is repartitioned before that step
(``renew``).

Megatron's optimizer keeps its groups, schedule, clipping and inner optimizer.  This module replaces the
optimizer's tensors (`shard_fragments`), the source of the norm, and the gathering of parameters.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from megatron.core.optimizer import optimizer as optimizer_module
from megatron.training import get_args

from recover_megatron.instep.manager import Manager, Overlap
from recover_megatron.instep.trainer import Parameters, alive
from recover_megatron.megatron_hooks import monkeypatch
from recover_megatron.megatron_hooks.fsdp.fsdp_buckets import FsdpBuckets
from recover_megatron.megatron_hooks.gradients.buckets import Buckets
from recover_megatron.megatron_hooks.optimizer import precision
from recover_megatron.megatron_hooks.optimizer.keeping import Keeping
from recover_megatron.megatron_hooks.optimizer.shadows import HostShadows, LayoutPieces
from recover_megatron.megatron_hooks.optimizer.shard_fragments import ShardFragment, ShardFragments
from recover_megatron.workload.grid import Column

_groups_of: WeakKeyDictionary[Any, dict[Any, int]] = WeakKeyDictionary()
"""Optimizer -> model parameter -> number of the parameter's group.  Recorded before the optimizer's constructor reduces
the groups to this worker's shard."""


def install() -> None:
    """Wrap the optimizer's seams, before the optimizer is created; raises UserError if their signatures are unknown."""

    def noting(original: Callable[..., None]) -> Callable[..., None]:
        def __init__(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            groups = optimizer.param_groups if optimizer is not None else []
            _groups_of[self] = {
                parameter: number for number, group in enumerate(groups) for parameter in group["params"]
            }
            original(self, optimizer, *args, **kwargs)
            precision.check(self.config)

        return __init__

    monkeypatch.wrap("DistributedOptimizer.__init__", noting)
    precision.install()


def groups_with_parameters(one: Any) -> list[dict[str, Any]]:
    """Return the inner optimizer's groups that have parameters of this position, on any worker of the column."""
    used = set(_groups_of[one].values())
    return [group for number, group in enumerate(one.optimizer.param_groups) if number in used]


class ShardedOptimizer:
    """Distributed optimizer of one worker, which combines all of Megatron's optimizers.

    ``buckets``: the model's buckets; their ``shards`` are not None.  ``keeping``: the storage of the optimizers' state.
    ``shadows``: number of copies of each part of the state in addition to the owner's copy.  ``shadow_device``: the
    device of these copies; None if they stay on the worker's device.
    """

    def __init__(
        self,
        optimizer: Any,
        buckets: Buckets | FsdpBuckets,
        keeping: Keeping,
        manager: Manager,
        shadows: int,
        shadow_device: torch.device | None,
    ) -> None:
        assert buckets.shards is not None
        self._optimizer = optimizer
        self._buckets, self._keeping = buckets, keeping
        self.shards = buckets.shards
        self._manager = manager
        chained = getattr(optimizer, "chained_optimizers", [optimizer])
        real = [one for one in chained if not one.is_stub_optimizer]
        self._fragments = [keeping.fragments(one, _groups_of[one], shadow_device) for one in real]
        self._pieces = LayoutPieces(self._fragments, buckets, self.shards, manager)
        self._parameters = Parameters(buckets.parameters, self.shards)
        device = buckets.parameters[0][1].device
        self.updated = 0
        """Iteration of the last update; 0 before the first update."""
        self._shadows_elsewhere = shadow_device is not None and shadow_device.type != device.type
        self._aside = HostShadows(self._fragments, float(optimizer.config.clip_grad))
        self._overlap: Overlap | None = None
        if self._fragments and buckets.overlaps and shadow_device is None:
            self._overlap = manager.overlap(buckets.parameters, self.shards, self._lose)
        buckets.overlap = self._overlap
        self._optimizers = real
        zeros = bool(optimizer.config.log_num_zeros_in_grad)
        self._norms = UnitNorms(self._pieces, keeping, shadows + 1, zeros)
        places = [self.shards.columns.index(self._pieces.column(fragments)) for fragments in self._fragments]
        self._scales = LossScales(real, self._fragments, places)
        for one, fragments in zip(real, self._fragments, strict=True):
            keeping.connect(one, fragments, self._primary_fragments, self._primary_parts)

    # ---- placement of the state

    def adopt(self) -> None:
        """Adopt, at launch, the shards that Megatron created, or loaded from a checkpoint.

        At iteration 0 the state follows from the parameters, which all workers have, so this function creates the
        shadows.  After the load of a later iteration, it does so only if every worker has the complete state; otherwise
        a repartition creates the shadows before the first step.
        """
        self.shards.adopt()
        for fragments in self._fragments:
            (own,) = self.shards.held(self._pieces.column(fragments))
            self._keeping.adopt(fragments, own, self._pieces.parts(fragments, own, {}))
        if get_args().iteration > 0 and not self._keeping.has_all:  # all workers have loaded a checkpoint
            return
        layouts = self._pieces.wanted()
        for fragments in self._fragments:
            fragments.install(self._pieces.make(fragments, layouts))
        self._keeping.adopted()
        self.shards.take_up(layouts)

    def forget(self) -> None:
        """Drop this worker's part of the state, because the worker has lost its place or never had a place."""
        self.shards.forget()
        self._aside.join()
        for fragments in self._fragments:
            fragments.install({})
        self._keeping.adopted()
        if self._overlap is not None:
            self._overlap.forget()

    @contextmanager
    def loading(self) -> Iterator[Callable[[], None]]:
        """Context of a checkpoint load, in which each live worker gets its shard and its shadows.

        Yields a function that makes the new layout the current layout.  The caller calls this function once all
        workers have loaded the checkpoint.
        """
        self.forget()
        layouts = self._pieces.wanted()
        with ExitStack() as into:
            for one, fragments in zip(self._optimizers, self._fragments, strict=True):
                into.enter_context(self._keeping.loading(one, fragments, self._pieces.make(fragments, layouts)))
            yield lambda: self.shards.take_up(layouts)

    def made_anew(self, fill: Callable[[list[list[ShardFragment]]], None]) -> Callable[[], None]:
        """Rebuild the pieces for the layout of the live workers; ``fill`` loads the state of these pieces.

        Returns a function that makes the new layout the current layout.  The caller calls this function once all
        workers have rebuilt their pieces.
        """
        self.forget()
        layouts = self._pieces.wanted()
        held = [self._pieces.make(fragments, layouts) for fragments in self._fragments]
        fill([[fragment for unit in units.values() for fragment in unit] for units in held])
        for fragments, units in zip(self._fragments, held, strict=True):
            fragments.install(units)
        return lambda: self.shards.take_up(layouts)

    def bucket(self, number: int) -> tuple[Column, int]:
        """Return (column, number of elements) of bucket ``number``."""
        return self._buckets.part(number)

    def check(self) -> None:
        """Raise ``StateLost`` on all workers if a part of the optimizer's state has no live holder.

        If a checkpoint or a snapshot exists to which the run can roll back, raises ``Orphaned`` on all workers instead.
        """
        if units := self.shards.lost():
            self._lose(*units)

    def _lose(self, *units: int) -> None:
        names = ", ".join(map(str, units))
        noun = "workers" if self._buckets.instances == 1 else "shards"
        self._manager.lose_state(f"the optimizer state of {noun} {names} had no other copy")

    def complete(self) -> None:
        """Wait until the last update of the model and the shadows is complete; called before any of them is read."""
        self._aside.join()
        if self._overlap is not None:
            self._overlap.complete_all()

    def due(self) -> bool:
        """Return whether a repartition is due before the next step.  It is postponed if a worker joins in that step."""
        return self.shards.stale() and not self._manager.view.joining_next

    def renew(self) -> None:
        """Repartition the state over the current workers, in a section, so that all workers do it or none does."""
        self.complete()
        self._pieces.change_hands()
        self.check()

    def verify(self) -> None:
        """Compare the shadows with their originals; if one differs, all workers rebuild all shadows."""
        self._aside.join()
        if not self._shadows_elsewhere:  # a host rounds differently than a GPU, so its shadows have other bits
            self._pieces.compare()

    def _primary_fragments(self, fragments: ShardFragments) -> Iterator[ShardFragment]:
        column = self._pieces.column(fragments)
        return (p for unit, pieces in fragments.held.items() if self.shards.speaks_for(column, unit) for p in pieces)

    def primaries(self) -> Iterator[tuple[ShardFragments, Iterator[ShardFragment]]]:
        """Return, per optimizer of Megatron, (all pieces of this worker, pieces of which it is the primary holder)."""
        self._aside.join()
        return ((fragments, self._primary_fragments(fragments)) for fragments in self._fragments)

    def _primary_parts(self, fragments: ShardFragments, number: int) -> list[tuple[int, int]]:
        column, numel = self._buckets.part(number)
        layout = self.shards.layout(column)
        units = [unit for unit in self.shards.held(column) if self.shards.speaks_for(column, unit)]
        return sorted(part for unit in units for part in layout.parts(unit, numel))

    @contextmanager
    def saving(self, *, moments: bool = True) -> Iterator[None]:
        """Context of a checkpoint write, in which Megatron has the column's complete state if it cannot save pieces.

        If ``moments`` is False, Megatron has only the complete main parameters, to compute their norm.

        The state is gathered in a section before the checkpoint's section.  So if a worker is lost during the
        checkpoint's section, the survivors have the complete state, and no worker waits inside its replica for a peer
        whose operation over the column has failed.
        """
        manager = self._manager

        def gather() -> None:
            manager.mark("checkpoint" if moments else "parameters' norm", waiting=True)
            found = [part for fragments in self._fragments for part in self._keeping.lend(fragments, moments=moments)]
            whole = Parameters(found, self.shards)
            whole.begin()
            whole.gather(manager.view.groups, manager.view.live, again=False)

        with ExitStack() as shown:
            if self._keeping.has_all:
                self.complete()
                manager.section("state of checkpoint", gather)
                for fragments in self._fragments:
                    shown.enter_context(self._keeping.show(fragments))
            yield

    # ---- the update

    def step(self, original: Callable[[], Any]) -> Any:
        """Run ``original``, Megatron's ``optimizer.step()``, in a section that survives deaths; return its result."""
        manager, parameters, overlap = self._manager, self._parameters, self._overlap
        sums = self._norms.measure()
        # The first call for each group is a collective inside the replica.  It runs outside the section, because the
        # section may be revoked in one column after another column of the replica has completed the section.
        for group in getattr(optimizer_module, "SEPARATE_GRAD_NORM_GROUPS", ()):
            self._optimizer.has_grad_norm_group(group)
        parameters.begin()
        self.complete()
        if overlap is not None:
            overlap.withdraw()
        done: list[Any] = []
        begun = False

        def run() -> None:
            nonlocal begun
            manager.inject("norm")
            manager.mark("norm", waiting=True)
            units, again = self._norms.exchange(sums, begun)
            if not done:
                manager.inject("update")
                done.append(self._update(original, units))
                manager.inject("update")
            if overlap is not None:
                overlap.publish(manager.view.number)
                return
            self._speak_for_the_lost()
            manager.mark("param-gather", waiting=True)
            begun = True
            parameters.gather(manager.view.groups, manager.view.live, again=again)

        self.updated = manager.view.iteration
        manager.section("update", run)
        if overlap is not None:
            with manager.waiting("param-gather"):
                overlap.start(manager.view.number)
        self._keeping.gathered()
        return done[0]

    def _update(self, original: Callable[[], Any], units: Sequence[UnitSums]) -> Any:
        top, norm = self._optimizer, self._scales.norm(units)
        zeros = math.fsum(unit.zeros for unit in units)
        # Megatron skips an update whose norm is above the threshold, so the shadows must skip it, too.
        if not self._scales.skips(units) and not norm > getattr(top.config, "grad_norm_skip_threshold", math.inf):
            self._aside.begin(norm, self._scales.now())
        with (
            self._scales.dividing(units),
            monkeypatch.replaced(optimizer_module, get_grad_norm_fp32=lambda *_, **__: norm),
            monkeypatch.replaced(top, get_grad_norm=lambda: norm, count_zeros=lambda: zeros),
            self._keeping.updating(),
        ):
            return original()

    def _speak_for_the_lost(self) -> None:
        """Copy to the model each unit that the shadow device updated, if this worker is its first live holder."""
        for fragments in self._fragments:
            column = self._pieces.column(fragments)
            for unit in self.shards.held(column):
                if any(fragment.on_shadow_device for fragment in fragments.held[unit]) and self.shards.speaks_for(
                    column, unit
                ):
                    self._aside.join()
                    fragments.copy_shadows_to_model(unit)


@dataclass(frozen=True)
class UnitSums:
    """Sum of squares, and number of zeros, of one unit's gradients.

    ``column``: the index of the unit's column in ``Shards.columns``.
    """

    column: int
    squares: float
    zeros: float


@dataclass(eq=False)
class UnitNorms:
    """Measures the gradient norms of the units that this worker holds, and exchanges them over the column."""

    _pieces: LayoutPieces
    _keeping: Keeping
    _width: int
    """Maximum number of units of one column that a worker holds."""
    _zeros: bool
    """True if zeros among the gradients are also counted (--log-num-zeros-in-grad)."""

    def measure(self) -> torch.Tensor:
        """Return the sums of this worker's units: a float64 tensor of shape [columns, held units, 2], on the host.

        The last dimension is (sum of squares, number of zeros), summed over the model-parallel ranks.
        """
        shards, device = self._pieces.shards, self._pieces.buckets.parameters[0][1].device
        sums = torch.zeros(len(shards.columns), self._width, 2, dtype=torch.float64, device=device)
        for at, column in enumerate(shards.columns):
            for place, unit in enumerate(shards.held(column)):
                for fragments in self._pieces.fragments:
                    if fragments.buckets and unit in fragments.held and self._pieces.column(fragments) == column:
                        sums[at, place] += fragments.sums(unit, zeros=self._zeros)
        group = self._keeping.norm_group()
        if group.size() > 1:
            dist.all_reduce(sums, group=group)
        return sums.cpu()

    def exchange(self, sums: torch.Tensor, begun: bool) -> tuple[list[UnitSums], bool]:
        """Exchange ``sums``, the result of ``measure``, over the column.

        Returns (the sums of all units, True if ``begun`` is true on any worker), equal on all workers of the column.
        ``begun``: True if this worker has begun to gather parameters.

        Each worker sends a row: ``begun``, then per held unit (number of the unit, 1 if the worker is the unit's
        primary, sum of squares, number of zeros).
        """
        shards, view = self._pieces.shards, self._pieces.manager.view
        row = [float(begun)]
        for at, column in enumerate(shards.columns):
            held = shards.held(column)
            for place in range(self._width):
                unit = held[place] if place < len(held) else -1
                speaks = unit >= 0 and shards.speaks_for(column, unit)
                row += [float(unit), float(speaks), *sums[at, place].tolist()]
        column = alive(self._keeping.tells_norms, view.live)
        rows = view.groups.ring(column).exchange_doubles(row)
        found = [
            UnitSums(at // (4 * self._width), *one[at + 3 : at + 5])
            for one in rows
            for at in range(0, len(one) - 1, 4)
            if one[at + 2]
        ]
        return found, any(one[0] for one in rows)


class LossScales:
    """The loss scales (--fp16) of ``optimizers``, including the experts' optimizer, for sharded gradients.

    To skip a step after an overflow, stock Megatron reduces an overflow flag over all workers.  With --recover each
    worker derives the overflow from the exchanged sums of squares, so all workers skip a step or none does.
    ``fragments``: the pieces of each optimizer; ``columns``: the index of each optimizer's column.
    """

    def __init__(self, optimizers: Sequence[Any], fragments: Sequence[ShardFragments], columns: Sequence[int]) -> None:
        self._every = list(zip(optimizers, fragments, columns, strict=True))

    def now(self) -> list[float]:
        """Return the loss scale of each optimizer; 1 for an optimizer without a loss scale."""
        return [float(one.grad_scaler.scale) if _scaled(one) else 1.0 for one, _, _ in self._every]

    def norm(self, units: Sequence[UnitSums]) -> float:
        """Return the norm of the unscaled gradients.  ``fsum`` makes it independent of the order of ``units``."""
        scales = {column: scale for (_, _, column), scale in zip(self._every, self.now(), strict=True)}
        return math.sqrt(math.fsum(unit.squares / scales.get(unit.column, 1.0) ** 2 for unit in units))

    def skips(self, units: Sequence[UnitSums]) -> bool:
        return any(_scaled(one) and _overflowed(units, column) for one, _, column in self._every)

    @contextmanager
    def dividing(self, units: Sequence[UnitSums]) -> Iterator[None]:
        """Context in which Megatron's step unscales the pieces' gradients, and finds overflows from ``units``."""
        with ExitStack() as replaced:
            for one, fragments, column in self._every:
                if _scaled(one):
                    divide = functools.partial(_divide, one, fragments, found=_overflowed(units, column))
                    replaced.enter_context(monkeypatch.replaced(one, _unscale_main_grads_and_check_for_nan=divide))
            yield


def _scaled(one: Any) -> bool:
    return getattr(one, "grad_scaler", None) is not None


def _overflowed(units: Sequence[UnitSums], column: int) -> bool:
    return not all(math.isfinite(unit.squares) for unit in units if unit.column == column)


def _divide(one: Any, fragments: ShardFragments, *, found: bool) -> bool:
    fragments.divide(one.grad_scaler.inv_scale)
    return found
