"""Where Megatron keeps a spread optimizer's state, and what it calls to update, to save and to load it.

``Keeping`` is what `sharded_optimizer` asks; ``InBuckets`` answers for the distributed optimizer, whose buckets lie in
Megatron's DDP, and `fsdp.outer` for Megatron-FSDP, whose shard groups share their shards' state.

Shards lie where deaths have left them; checkpoints of them are in Megatron's formats, all of them:

    fully reshardable, legacy    ``whole``: every part of the state brought together, as Megatron's own gathering does
    by bucket (its default)      ``by_bucket``: each worker writes the parts that it speaks for, where they belong

Either loads in stock Megatron at any data-parallel size: no format says who held what.  While the run goes back to a
checkpoint (`rejoin`) it is loaded into the pieces that workers are to hold, in place of the lost (``loading_into``).
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
    """Writes one of Megatron's distributed optimizers.  ``primaries``, ``parts``: what this worker speaks for."""

    def __init__(self, optimizer: Any, fragments: ShardFragments, primaries: Primaries, parts: Parts) -> None:
        self._optimizer = optimizer
        self._fragments = fragments
        self._primaries = primaries
        self._parts = parts
        self._numbers = {id(bucket): number for number, bucket in fragments.buckets.items()}
        self._padded = False
        self._prefix = f"optimizer.distributed.dp_group_idx_{optimizer.data_parallel_group_idx}"
        # Before 0.19 there was no other optimizer than Adam.
        self._keys = ("param", *getattr(optimizer, "optimizer_state_keys", ("exp_avg", "exp_avg_sq")))

    def whole(
        self, use_gloo_comm: bool = True, empty_data: bool = False, return_on_all_ranks: bool = False
    ) -> dict[Any, Any] | None:
        """As ``DistributedOptimizer.get_parameter_state_dp_zero``."""
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
                    dist.all_reduce(tensor, group=group)  # all but one have zeros for each element
            (dtype,) = ranges
            state[number] = {dtype: {**tensors, "numel_unpadded": size}}
        return state if wanted else None

    def _starts(self, buffer: Any) -> dict[int, int]:
        """Of each bucket, where its elements begin in what is brought together of its buffer."""
        offset, starts = 0, {}
        for bucket in buffer.buckets:
            starts[self._numbers[id(bucket)]] = bucket.offset if self._padded else offset
            offset += bucket.numel_unpadded  # the legacy format leaves out the padding between buckets
        return starts

    def _fill(self, buffer: Any, tensors: dict[str, torch.Tensor]) -> None:
        starts = self._starts(buffer)
        for fragment in self._primaries(self._fragments):
            if fragment.bucket in starts:
                at = starts[fragment.bucket]
                for key, its in _tensors(fragment).items():
                    if key in tensors:  # before the first step there are no moments: zeros, from which it begins
                        tensors[key][at + fragment.start : at + fragment.stop].copy_(its)

    def in_model_space(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """As ``DistributedOptimizer.sharded_param_state_fully_reshardable``, which is ``original``.

        It looks for a parameter where it lies in the buffer, padding included, in tensors that leave the padding out:
        here they have it, so that a parameter behind a padded bucket gets its own state.
        """

        def sharded_param_state_fully_reshardable(*args: Any, **kwargs: Any) -> Any:
            self._padded = True
            try:
                return original(*args, **kwargs)
            finally:
                self._padded = False

        return sharded_param_state_fully_reshardable

    def by_bucket(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """As ``DistributedOptimizer.sharded_param_state_dp_reshardable``; ``original`` is used for loading."""

        def sharded_param_state_dp_reshardable(
            model_sharded_state_dict: Any, is_loading: bool = False, metadata: Any = None
        ) -> Any:
            if is_loading:
                return original(model_sharded_state_dict, is_loading, metadata)
            return self._by_bucket()

        return sharded_param_state_dp_reshardable

    def wanted(self, fragments: Sequence[ShardFragment]) -> dict[Any, Any]:
        """What to load, of a checkpoint by bucket, into these pieces; their state is there, whatever is in it."""
        instance = self._optimizer.distributed_optimizer_instance_id
        state: dict[Any, Any] = {}
        for fragment in fragments:
            (number, dtype, at), key, size = self._place(fragment.bucket)
            entry = _entry(key, fragment.start, size, instance, _tensors(fragment))
            state.setdefault(number, {}).setdefault(dtype, {}).setdefault(at, []).append(entry)
        return state

    def found(self, state: Any, fragments: Sequence[ShardFragment]) -> Iterator[dict[str, Any]]:
        """What came of it for each of the pieces, in their order."""
        places = {place: iter(its) for place, its in _lists(state)}
        return (next(places[self._place(fragment.bucket)[0]]) for fragment in fragments)

    def found_in_model_space(self, state: Any, fragments: Sequence[ShardFragment]) -> Iterator[dict[str, Any]]:
        """The same of a fully reshardable checkpoint, whose tensors are those of whole parameters."""
        parameters = (its for buffer in self._optimizer.buffers for its in buffer.param_index_map)
        numbers = {parameter: number for number, parameter in enumerate(parameters)}
        for fragment in fragments:
            its = self._fragments.range_of(fragment)
            part = slice(fragment.start - its.start, fragment.stop - its.start)
            yield {name: whole.flatten()[part] for name, whole in state[numbers[its.parameter]].items()}

    def found_by_rank_0(
        self, state: Any, fragments: Sequence[ShardFragment]
    ) -> Iterator[tuple[ShardFragment, dict[str, Any]]]:
        """The same of a legacy checkpoint, which the column's rank 0 has read; in an order of their own."""
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
                    yield fragment, {key: its[at + fragment.start : at + fragment.stop] for key, its in tensors.items()}

    def _place(self, bucket: int) -> tuple[tuple[int, Any, int], str, int]:
        """Where Megatron has a bucket: buffer, type, number in it; its key in a checkpoint; its elements there."""
        optimizer = self._optimizer
        for number, (buffer, ranges) in enumerate(zip(optimizer.buffers, optimizer.gbuf_ranges, strict=True)):
            (dtype,) = ranges
            for at, its in enumerate(buffer.buckets):
                if self._numbers[id(its)] == bucket:
                    return (number, dtype, at), f"{self._buffer(number, dtype)}{at}", its.numel_unpadded
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
        """All that this worker speaks for of a bucket, the gaps between parameters too: a file must have no holes."""
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
        """As stock Megatron writes them: moments at least in float32, and the remainder where it keeps that."""
        found = {name: its.float() if its.element_size() < 4 else its for name, its in _tensors(fragment).items()}
        for name in set(self._keys) - set(found):  # of an optimizer that has not made a step: what it begins from
            found[name] = torch.zeros_like(fragment.tensor, dtype=torch.float32)
        if self._fragments.has_remainder(fragment):
            found["param"] = precision.remainder(fragment.tensor)
        return found

    def _empty(self, bucket: int, own: Sequence[ShardFragment], numel: int) -> dict[str, torch.Tensor]:
        """Elements that are no parameter's, in the types of ``own``, the pieces of this bucket, if there are any."""
        model = self._fragments.buckets[bucket].param_data.dtype
        main = torch.int16 if precision.has_remainders(self._optimizer, model) else torch.float32
        types = {**dict.fromkeys(self._keys, torch.float32), "param": main}
        types |= {name: its.dtype for fragment in own[:1] for name, its in self._written(fragment).items()}
        return {key: torch.zeros(numel, dtype=types[key]) for key in self._keys}

    @contextmanager
    def loading_into(self, held: dict[int, list[ShardFragment]]) -> Iterator[None]:
        """Have the optimizer load a checkpoint into the pieces of ``held``, which it then updates.

        Megatron's own loading knows one layout, that of the launch: a shard for each rank, and no shadow.  Here it asks
        for the pieces of another one, and gets them; what else it loads (groups, steps, the scaler) it loads as ever.
        The state of the pieces is made here, and of no use before the checkpoint is loaded.  Raises ValueError for a
        checkpoint of another format.
        """
        optimizer, fragments = self._optimizer, self._fragments
        every = [fragment for its in held.values() for fragment in its]
        fragments.install(held)
        optimizer._init_optimizer_states_with_dummy_values()  # an update by zeros: all is read from the checkpoint

        def wanted(model_sharded_state_dict: Any, is_loading: bool = False, metadata: Any = None) -> Any:
            # Not before: Megatron has loaded the groups, and torch has made new dicts of the state.
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
        if name == "step":  # read from the groups
            entry[name] = LocalNonpersistentObject(tensor)
            continue
        entry[name] = ShardedTensor(
            f"{key}.{name}", tensor, tensor.dtype, tensor.shape, (size,), (start,), axis_fragmentations=None,
            replica_id=(instance, 0, 0),
        )  # fmt: skip
    return entry


OTHER_FORMATS = ("sharded_param_state_dp_zero", "sharded_param_state_fs_model_space")
"""Methods by which a distributed optimizer asks for a checkpoint of a format that Megatron writes no more."""


def _copy(fragment: ShardFragment, entry: dict[str, Any]) -> None:
    with torch.no_grad():
        for name, value in entry.items():
            if name == "param":
                fragment.tensor.copy_(value)
            elif isinstance(value, torch.Tensor) and value.dim():
                fragment.state[name].copy_(value)
    if isinstance(step := fragment.state.get("step"), torch.Tensor):
        fragment.state["step"] = step.clone()  # Megatron gives all parameters one and the same


def _refuse(*args: Any, **kwargs: Any) -> Sequence[Any]:
    raise ValueError("it is in a format that Megatron does not write any more: no run goes back to one in place")


class Keeping(ABC):
    """Where the state of a spread optimizer lies, and how Megatron updates, saves and loads it.

    In all methods ``one`` is one of Megatron's optimizers, and ``fragments`` what this worker holds of its state.
    """

    has_all = False
    """Whether at launch, and for a checkpoint, each worker has the state of all that its column shares."""

    @property
    @abstractmethod
    def tells_norms(self) -> Column:
        """The column whose members tell each other the norms of their units: each unit is held by some of them."""

    @abstractmethod
    def norm_group(self) -> Any:
        """Megatron's group over which a unit's norm is added up: all of one replica that hold a part of it."""

    @abstractmethod
    def fragments(self, one: Any, groups: dict[Any, int], shadow_device: torch.device | None) -> ShardFragments:
        """What is held of ``one``: nothing yet.  ``groups``: its parameters -> number of their group."""

    def connect(self, one: Any, fragments: ShardFragments, primaries: Primaries, parts: Parts) -> None:
        """Have Megatron update the pieces, and save them.  ``primaries``, ``parts``: what this worker speaks for."""
        one._copy_model_grads_to_main_grads = fragments.begin_update
        one._copy_main_params_to_model_params = fragments.end_update

    @abstractmethod
    def adopt(self, fragments: ShardFragments, unit: int, parts: dict[int, Sequence[tuple[int, int]]]) -> None:
        """At launch: take over what Megatron has made, or read."""

    def adopted(self) -> None:  # noqa: B027  nothing is to be given up
        """The pieces have memory of their own, or are of no use: what Megatron has made is not needed any more."""

    def updating(self) -> AbstractContextManager[None]:
        """While Megatron's step makes the update, before the parameters are gathered."""
        return nullcontext()

    def gathered(self) -> None:  # noqa: B027  Megatron gathers none
        """The model's parameters are those of the update."""

    @abstractmethod
    def loading(
        self, one: Any, fragments: ShardFragments, held: dict[int, list[ShardFragment]]
    ) -> AbstractContextManager[None]:
        """While Megatron loads a checkpoint in place: into the pieces of ``held``.  Raises ValueError if it cannot."""

    def lend(self, fragments: ShardFragments, *, moments: bool) -> list[tuple[Column, torch.Tensor]]:
        """Room for all the state that the column shares, with what is held here in its place: (column, flat tensor).

        Not ``moments``: for the main parameters alone.  In one order at all members.  Empty where Megatron saves the
        pieces as they are.
        """
        return []

    def show(self, fragments: ShardFragments) -> AbstractContextManager[None]:
        """While a checkpoint is written: Megatron finds what was lent, which is complete, where it looks for it."""
        return nullcontext()


class InBuckets(Keeping):
    """Of the distributed optimizer."""

    def __init__(self, buckets: Buckets) -> None:
        self._buckets = buckets
        self._saved: dict[int, ShardedCheckpoint] = {}
        """Of each of Megatron's optimizers, by its ``id``."""

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
        # Those who are left write; which instance a worker was in does not matter.
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
