"""Storage of a sharded optimizer's state: how Megatron updates, saves and loads this state.

`sharded_optimizer` uses the interface ``Keeping``.  ``InBuckets`` implements this interface for the distributed
optimizer with Megatron's DDP buckets, and `fsdp.outer` for Megatron-FSDP with a state sharded over the shard groups.

After deaths the shards are unevenly distributed.  Checkpoints still have Megatron's formats:

    fully reshardable, legacy    ``whole`` gathers all parts of the state, as Megatron's own function does
    by bucket (the default)      ``by_bucket``: each worker is the primary (first live holder) of some parts of the
                                 state, and writes these parts at their offsets in the bucket

Stock Megatron loads each format at any data-parallel size, because no format records which worker held a part.  A
rollback (`rejoin`) loads a checkpoint into the pieces of the new layout (``loading_into``).  A *unit* is a share of the
state; a *piece* is the part of a unit that lies in one parameter (`shard_fragments`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor

from recover_megatron.megatron_hooks import monkeypatch
from recover_megatron.megatron_hooks.gradients.buckets import Buckets
from recover_megatron.megatron_hooks.optimizer import precision
from recover_megatron.megatron_hooks.optimizer.shard_fragments import ShardFragment, ShardFragments
from recover_megatron.workload.grid import Column

Primaries = Callable[[ShardFragments], Iterator[ShardFragment]]
Parts = Callable[[ShardFragments, int], list[tuple[int, int]]]


class ShardedCheckpoint:
    """Checkpoint writer and reader of one distributed optimizer.

    ``primaries``: function that returns the pieces of which this worker is the primary.  ``parts``: function that
    returns, for one bucket, the ranges of which this worker is the primary.
    """

    def __init__(self, optimizer: Any, fragments: ShardFragments, primaries: Primaries, parts: Parts) -> None:
        self._optimizer = optimizer
        self._fragments = fragments
        self._primaries = primaries
        self._parts = parts
        self._numbers = {id(bucket): number for number, bucket in fragments.buckets.items()}
        self._padded = False
        self._prefix = f"optimizer.distributed.dp_group_idx_{optimizer.data_parallel_group_idx}"
        # Before Megatron 0.19, Adam was the only optimizer.
        self._keys = ("param", *getattr(optimizer, "optimizer_state_keys", ("exp_avg", "exp_avg_sq")))

    def whole(
        self, use_gloo_comm: bool = True, empty_data: bool = False, return_on_all_ranks: bool = False
    ) -> dict[Any, Any] | None:
        """Return the complete state; replaces ``DistributedOptimizer.get_parameter_state_dp_zero``."""
        optimizer = self._optimizer
        group = optimizer.data_parallel_group
        wanted = group.rank() == 0 or return_on_all_ranks
        state: dict[Any, Any] = {"buckets_coalesced": True}
        for number, (buffer, ranges) in enumerate(zip(optimizer.buffers, optimizer.gbuf_ranges, strict=True)):
            size = buffer.numel if self._padded else buffer.numel_unpadded
            tensors: dict[str, Any] = {key: torch.zeros(size, dtype=torch.float32) for key in self._keys}
            if not empty_data:
                self._fill(buffer, tensors)
                for tensor in tensors.values():
                    dist.all_reduce(tensor, group=group)  # for each element, at most one rank has a nonzero value
            (dtype,) = ranges
            state[number] = {dtype: {**tensors, "numel_unpadded": size}}
        return state if wanted else None

    def _starts(self, buffer: Any) -> dict[int, int]:
        """Return the offset of each bucket in the gathered tensor of its buffer."""
        offset, starts = 0, {}
        for bucket in buffer.buckets:
            starts[self._numbers[id(bucket)]] = bucket.offset if self._padded else offset
            offset += bucket.numel_unpadded  # the legacy format has no padding between buckets
        return starts

    def _fill(self, buffer: Any, tensors: dict[str, torch.Tensor]) -> None:
        starts = self._starts(buffer)
        for fragment in self._primaries(self._fragments):
            if fragment.bucket in starts:
                at = starts[fragment.bucket]
                for key, value in _tensors(fragment).items():
                    if key in tensors:  # moments that do not exist before the first step stay zero
                        tensors[key][at + fragment.start : at + fragment.stop].copy_(value)

    def in_model_space(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``original``, ``DistributedOptimizer.sharded_param_state_fully_reshardable``, to save padded tensors.

        Megatron's tensors have no padding, but Megatron indexes them by offsets that include padding.  With padded
        tensors, a parameter behind a padded bucket gets the right state.
        """

        def sharded_param_state_fully_reshardable(*args: Any, **kwargs: Any) -> Any:
            self._padded = True
            try:
                return original(*args, **kwargs)
            finally:
                self._padded = False

        return sharded_param_state_fully_reshardable

    def by_bucket(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``original``, ``DistributedOptimizer.sharded_param_state_dp_reshardable``, to save the pieces.

        For loading, ``original`` is called.
        """

        def sharded_param_state_dp_reshardable(
            model_sharded_state_dict: Any, is_loading: bool = False, metadata: Any = None
        ) -> Any:
            if is_loading:
                return original(model_sharded_state_dict, is_loading, metadata)
            return self._by_bucket()

        return sharded_param_state_dp_reshardable

    def wanted(self, fragments: Sequence[ShardFragment]) -> dict[Any, Any]:
        """Return the state dict that requests ``fragments`` from a checkpoint in the format "by bucket".

        The state tensors of ``fragments`` must exist.
        """
        instance = self._optimizer.distributed_optimizer_instance_id
        state: dict[Any, Any] = {}
        for fragment in fragments:
            (number, dtype, at), key, size = self._place(fragment.bucket)
            entry = _entry(key, fragment.start, size, instance, _tensors(fragment))
            state.setdefault(number, {}).setdefault(dtype, {}).setdefault(at, []).append(entry)
        return state

    def found(self, state: Any, fragments: Sequence[ShardFragment]) -> Iterator[dict[str, Any]]:
        """Yield the state of each of ``fragments``, in order.  ``state``: the loaded state dict of ``wanted``."""
        places = {place: iter(entries) for place, entries in _lists(state)}
        return (next(places[self._place(fragment.bucket)[0]]) for fragment in fragments)

    def found_in_model_space(self, state: Any, fragments: Sequence[ShardFragment]) -> Iterator[dict[str, Any]]:
        """Yield the state of each of ``fragments``, in order, from the ``state`` of a fully reshardable checkpoint."""
        parameters = (parameter for buffer in self._optimizer.buffers for parameter in buffer.param_index_map)
        numbers = {parameter: number for number, parameter in enumerate(parameters)}
        for fragment in fragments:
            of = self._fragments.range_of(fragment)
            part = slice(fragment.start - of.start, fragment.stop - of.start)
            yield {name: whole.flatten()[part] for name, whole in state[numbers[of.parameter]].items()}

    def found_by_rank_0(
        self, state: Any, fragments: Sequence[ShardFragment]
    ) -> Iterator[tuple[ShardFragment, dict[str, Any]]]:
        """Yield (piece, state), one buffer after the other, from a legacy checkpoint, which only rank 0 has read."""
        optimizer, group = self._optimizer, self._optimizer.data_parallel_group
        for number, (buffer, ranges) in enumerate(zip(optimizer.buffers, optimizer.gbuf_ranges, strict=True)):
            (dtype,) = ranges
            tensors, starts = {}, self._starts(buffer)
            for key in self._keys:
                tensors[key] = torch.empty(buffer.numel_unpadded, dtype=torch.float32)
                if group.rank() == 0:
                    tensors[key].copy_(state[number][dtype][key])
                dist.broadcast(tensors[key], group=group, group_src=0)
            for fragment in fragments:
                if (at := starts.get(fragment.bucket)) is not None:
                    yield fragment, {key: one[at + fragment.start : at + fragment.stop] for key, one in tensors.items()}

    def _place(self, bucket: int) -> tuple[tuple[int, Any, int], str, int]:
        """Return a bucket's location (buffer, dtype, number in buffer), its checkpoint key, and its unpadded size."""
        optimizer = self._optimizer
        for number, (buffer, ranges) in enumerate(zip(optimizer.buffers, optimizer.gbuf_ranges, strict=True)):
            (dtype,) = ranges
            for at, one in enumerate(buffer.buckets):
                if self._numbers[id(one)] == bucket:
                    return (number, dtype, at), f"{self._buffer(number, dtype)}{at}", one.numel_unpadded
        raise KeyError(bucket)

    def _buffer(self, number: int, dtype: Any) -> str:
        return f"{self._prefix}.gbuf_idx_{number}.dtype_{dtype}.bucket_idx_"

    def _by_bucket(self) -> dict[Any, Any]:
        optimizer = self._optimizer
        prefix = self._prefix
        instance = optimizer.distributed_optimizer_instance_id
        rank = optimizer.data_parallel_group.rank()
        state: dict[Any, Any] = {
            name: ShardedObject(
                f"{prefix}.{name}", getattr(optimizer, name), (1,), (0,), replica_id=(instance, 0, rank)
            )
            for name in ("per_bucket_numel", "per_bucket_numel_unpadded")
        }
        for number, (buffer, ranges) in enumerate(zip(optimizer.buffers, optimizer.gbuf_ranges, strict=True)):
            (dtype,) = ranges
            state[number] = {
                dtype: [
                    self._bucket(bucket, f"{self._buffer(number, dtype)}{at}", instance)
                    for at, bucket in enumerate(buffer.buckets)
                ]
            }
        return state

    def _bucket(self, bucket: Any, key: str, instance: int) -> list[dict[str, Any]]:
        """Return the parts of a bucket that this worker writes.

        Gaps between the pieces are filled with zeros, because a tensor in a checkpoint must have no gaps.
        """
        number, size = self._numbers[id(bucket)], bucket.numel_unpadded
        own = sorted((p for p in self._primaries(self._fragments) if p.bucket == number), key=lambda p: p.start)
        found = []
        for start, stop in self._parts(self._fragments, number):
            at = start
            for fragment in [p for p in own if start <= p.start < stop]:
                if at < fragment.start:
                    empty = self._empty(number, own, fragment.start - at)
                    found.append(_entry(key, at, size, instance, empty, padding=True))
                found.append(_entry(key, fragment.start, size, instance, self._written(fragment)))
                at = fragment.stop
            if at < min(stop, size):
                empty = self._empty(number, own, min(stop, size) - at)
                found.append(_entry(key, at, size, instance, empty, padding=True))
        return found

    def _written(self, fragment: ShardFragment) -> dict[str, torch.Tensor]:
        """Return the tensors that stock Megatron would write for ``fragment``.

        Moments are float32 or wider.  "param" is the main parameter, or its remainder, whichever stock Megatron keeps.
        """
        found = {
            name: value.float() if value.element_size() < 4 else value for name, value in _tensors(fragment).items()
        }
        for name in set(self._keys) - set(found):  # moments do not exist before the first step
            found[name] = torch.zeros_like(fragment.tensor, dtype=torch.float32)
        if self._fragments.has_remainder(fragment):
            found["param"] = precision.remainder(fragment.tensor)
        return found

    def _empty(self, bucket: int, own: Sequence[ShardFragment], numel: int) -> dict[str, torch.Tensor]:
        """Return ``numel`` zeros for each tensor name.

        If this worker has pieces of the bucket, ``own``, the zeros have the dtypes of these pieces.
        """
        model = self._fragments.buckets[bucket].param_data.dtype
        main = torch.int16 if precision.has_remainders(self._optimizer, model) else torch.float32
        types = {**dict.fromkeys(self._keys, torch.float32), "param": main}
        types |= {name: value.dtype for fragment in own[:1] for name, value in self._written(fragment).items()}
        return {key: torch.zeros(numel, dtype=types[key]) for key in self._keys}

    @contextmanager
    def loading_into(self, held: dict[int, list[ShardFragment]]) -> Iterator[None]:
        """Context in which Megatron loads a checkpoint into the pieces of ``held``, which are updated from then on.

        Megatron's own loading supports only the layout of the launch, with one shard per rank and no shadow.  In this
        context Megatron loads the pieces of ``held``, and everything else (groups, steps, the scaler) as usual.  This
        function creates the state of the pieces, which is undefined until the checkpoint is loaded.  Raises ValueError
        for a checkpoint in a format of ``OTHER_FORMATS``.
        """
        optimizer, fragments = self._optimizer, self._fragments
        every = [fragment for unit in held.values() for fragment in unit]
        fragments.install(held)
        optimizer._init_optimizer_states_with_dummy_values()  # creates states, which the load overwrites

        def wanted(model_sharded_state_dict: Any, is_loading: bool = False, metadata: Any = None) -> Any:
            # Create the states only now: Megatron has just loaded the groups, in which torch created new state dicts.
            for fragment in every:
                fragment.state = fragments.new_state(fragment)
            return self.wanted(every)

        def loaded(entries: Iterable[tuple[ShardFragment, dict[str, Any]]]) -> None:
            for fragment, entry in entries:
                fragment.state = fragments.new_state(fragment)
                _copy(fragment, entry)
                if fragment.model.dtype == torch.bfloat16:
                    model = fragment.model.to(fragment.tensor.device)
                    fragment.tensor.copy_(precision.whole(model, fragment.tensor))
            fragments.install(held)

        def by_bucket(state: Any) -> None:
            loaded(zip(every, self.found(state, every), strict=True))

        def fully_reshardable(state: Any) -> None:
            loaded(zip(every, self.found_in_model_space(state, every), strict=True))

        def legacy(state: Any, *, update_legacy_format: bool = False) -> None:
            loaded(self.found_by_rank_0(state, every))

        others = dict.fromkeys((name for name in OTHER_FORMATS if hasattr(optimizer, name)), _refuse)
        with monkeypatch.replaced(
            optimizer,
            sharded_param_state_dp_reshardable=wanted,
            load_parameter_state_from_dp_reshardable=by_bucket,
            load_parameter_state_from_fully_reshardable=fully_reshardable,
            load_parameter_state_from_dp_zero=legacy,
            **others,
        ):
            yield


def _lists(state: Any) -> Iterator[tuple[tuple[int, Any, int], list[dict[str, Any]]]]:
    for number, types in state.items():
        for dtype, buckets in types.items():
            for at, its in buckets.items():
                yield (number, dtype, at), its


def _tensors(fragment: ShardFragment) -> dict[str, torch.Tensor]:
    states = {name: value for name, value in fragment.state.items() if isinstance(value, torch.Tensor)}
    return {"param": fragment.tensor.detach(), **states}


def _entry(
    key: str, start: int, size: int, instance: int, tensors: dict[str, torch.Tensor], *, padding: bool = False
) -> dict[str, Any]:
    entry: dict[str, Any] = {"padding": LocalNonpersistentObject(padding)}
    for name, tensor in tensors.items():
        if name == "step":  # Megatron reads the step count from the groups
            entry[name] = LocalNonpersistentObject(tensor)
            continue
        entry[name] = ShardedTensor(
            f"{key}.{name}", tensor, tensor.dtype, tensor.shape, (size,), (start,), axis_fragmentations=None,
            replica_id=(instance, 0, 0),
        )  # fmt: skip
    return entry


OTHER_FORMATS = ("sharded_param_state_dp_zero", "sharded_param_state_fs_model_space")
"""Methods of a distributed optimizer that load checkpoints in formats that Megatron no longer writes."""


def _copy(fragment: ShardFragment, entry: dict[str, Any]) -> None:
    with torch.no_grad():
        for name, value in entry.items():
            if name == "param":
                fragment.tensor.copy_(value)
            elif isinstance(value, torch.Tensor) and value.dim():
                fragment.state[name].copy_(value)
    if isinstance(step := fragment.state.get("step"), torch.Tensor):
        fragment.state["step"] = step.clone()  # copied, because Megatron shares one tensor among all parameters


def _refuse(*args: Any, **kwargs: Any) -> Sequence[Any]:
    raise ValueError("a rollback cannot load this checkpoint's format, which Megatron no longer writes")


class Keeping(ABC):
    """Storage of a sharded optimizer's state, and how Megatron updates, saves and loads this state.

    In all methods ``one`` is one of Megatron's optimizers, and ``fragments`` are this worker's pieces of the state of
    ``one``.
    """

    has_all = False
    """True if each worker has its column's complete state at launch, and while a checkpoint is written or loaded."""

    @property
    @abstractmethod
    def tells_norms(self) -> Column:
        """Column whose members exchange the gradient norms of the units (shares of the state) that they hold.

        Each unit has a holder among these members.
        """

    @abstractmethod
    def norm_group(self) -> Any:
        """Return the process group that sums a unit's norm: the workers of one replica that hold parts of the unit."""

    @abstractmethod
    def fragments(self, one: Any, groups: dict[Any, int], shadow_device: torch.device | None) -> ShardFragments:
        """Return an empty set of pieces for ``one``.  ``groups``: parameter -> number of the parameter's group."""

    def connect(self, one: Any, fragments: ShardFragments, primaries: Primaries, parts: Parts) -> None:
        """Make Megatron update and save the pieces.  ``primaries``, ``parts``: as in ``ShardedCheckpoint``."""
        one._copy_model_grads_to_main_grads = fragments.begin_update
        one._copy_main_params_to_model_params = fragments.end_update

    @abstractmethod
    def adopt(self, fragments: ShardFragments, unit: int, parts: dict[int, Sequence[tuple[int, int]]]) -> None:
        """Adopt, at launch, the state that Megatron has created or loaded."""

    def adopted(self) -> None:  # noqa: B027  nothing to release
        """Release the memory of Megatron's own state; called once the pieces have separate memory or are dropped."""

    def updating(self) -> AbstractContextManager[None]:
        """Return the context of Megatron's update, which ends before the updated parameters are gathered."""
        return nullcontext()

    def gathered(self) -> None:  # noqa: B027  Megatron gathers none
        """Gather parameters inside the shard group, if needed.

        Called when the gathering over the column is complete or, with --overlap-param-gather, has begun.
        """

    @abstractmethod
    def loading(
        self, one: Any, fragments: ShardFragments, held: dict[int, list[ShardFragment]]
    ) -> AbstractContextManager[None]:
        """Return the context in which Megatron loads a checkpoint into the pieces of ``held``.

        The load raises ValueError if the checkpoint's format is not supported.
        """

    def lend(self, fragments: ShardFragments, *, moments: bool) -> list[tuple[Column, torch.Tensor]]:
        """Create buffers for the column's complete state, with this worker's parts filled in.

        Returns (column, flat tensor) of each buffer, in an order that is equal on all members of the column.  If
        ``moments`` is False, only main parameters get buffers.  Returns an empty list if Megatron saves the pieces
        directly.
        """
        return []

    def show(self, fragments: ShardFragments) -> AbstractContextManager[None]:
        """Return the context of a checkpoint write, in which Megatron saves the gathered buffers of ``lend``."""
        return nullcontext()


class InBuckets(Keeping):
    """Storage of the distributed optimizer's state, in the buckets of Megatron's DDP."""

    def __init__(self, buckets: Buckets) -> None:
        self._buckets = buckets
        self._saved: dict[int, ShardedCheckpoint] = {}
        """``id`` of each of Megatron's optimizers -> the optimizer's ``ShardedCheckpoint``."""

    @property
    def tells_norms(self) -> Column:
        return self._buckets.tail

    def norm_group(self) -> Any:
        return parallel_state.get_model_parallel_group()

    def fragments(self, one: Any, groups: dict[Any, int], shadow_device: torch.device | None) -> ShardFragments:
        buckets = {self._buckets.number(bucket): bucket for buffer in one.buffers for bucket in buffer.buckets}
        return ShardFragments(one, buckets, groups, shadow_device)

    def connect(self, one: Any, fragments: ShardFragments, primaries: Primaries, parts: Parts) -> None:
        super().connect(one, fragments, primaries, parts)
        # All survivors write, whichever instance of the distributed optimizer they belonged to.
        one.data_parallel_group, one.distributed_optimizer_instance_id = self._buckets.whole(one), 0
        saved = self._saved[id(one)] = ShardedCheckpoint(one, fragments, primaries, parts)
        one.get_parameter_state_dp_zero = saved.whole
        one.sharded_param_state_fully_reshardable = saved.in_model_space(one.sharded_param_state_fully_reshardable)
        one.sharded_param_state_dp_reshardable = saved.by_bucket(one.sharded_param_state_dp_reshardable)

    def adopt(self, fragments: ShardFragments, unit: int, parts: dict[int, Sequence[tuple[int, int]]]) -> None:
        fragments.adopt(unit, parts)

    def loading(
        self, one: Any, fragments: ShardFragments, held: dict[int, list[ShardFragment]]
    ) -> AbstractContextManager[None]:
        return self._saved[id(one)].loading_into(held)
