"""Optimizer state sharded both inside and across Megatron-FSDP's shard groups (--outer-dp-sharding-strategy optim)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from recover_megatron.megatron_hooks import monkeypatch
from recover_megatron.megatron_hooks.optimizer.keeping import Keeping
from recover_megatron.megatron_hooks.optimizer.shard_fragments import ShardFragment, ShardFragments
from recover_megatron.workload.grid import Column


@dataclass(eq=False)
class OuterBucket:
    """Local shard of one of Megatron-FSDP's parameter groups, with the interface of a DDP bucket."""

    group: Any
    param_to_index: dict[Any, tuple[int, int]] = field(init=False)
    """Parameter -> range of the parameter in the shard; only parameters that have elements in the shard."""

    def __post_init__(self) -> None:
        buffer = self.group.main_grad_buffer
        ranges = {p: buffer._get_item_local_shard_index(item) for item, p in enumerate(self.group.params)}
        first = buffer.shard_bucket_index.local_data_index
        self.param_to_index = {p: (a - first, b - first) for p, (a, b) in ranges.items() if a < b}

    @property
    def params_list(self) -> list[Any]:
        return list(self.param_to_index)

    @property
    def param_data(self) -> torch.Tensor:
        shard: torch.Tensor = self.group.model_weight_buffer.get_shard_from_local_buffer()
        return shard

    @property
    def grad_data(self) -> torch.Tensor:
        shard: torch.Tensor = self.group.main_grad_buffer.get_shard_from_local_buffer()
        return shard

    @property
    def main(self) -> torch.Tensor:
        """The 32-bit parameters that Megatron's own optimizer would update, flat; without memory after ``release``."""
        shard: torch.Tensor = self.group.main_weight_buffer.get_shard_from_local_buffer()
        return shard

    def release(self) -> None:
        """Free the memory of ``main``; ``regain`` allocates it again."""
        self.group.main_weight_buffer.data.untyped_storage().resize_(0)

    def regain(self) -> None:
        """Allocate the memory of ``main`` again, zeroed."""
        whole = self.group.main_weight_buffer.data
        whole.untyped_storage().resize_(whole.numel() * whole.element_size())
        whole.zero_()


LAUNCH = -1
"""Number of the temporary unit that has Megatron's complete state, until the state is cut into one unit per worker."""
MAIN, MOMENTS = "main", ("exp_avg", "exp_avg_sq")


class InShardGroups(Keeping):
    """Storage of an optimizer state and its shadows, sharded both inside and across the shard groups.

        worker's shard of a buffer   |--------------- inner shard ---------------|    equal on a column's K workers
        main parameters, moments     |== unit 0 ==|== unit 1 ==| .. |= unit K-1 =|    each on its owner and its shadows

    The model is built as for ``no_shard`` (`fsdp_state`), because with ``optim``, too, each shard group has all
    gradients and model parameters.  Megatron's own main parameters and moments are freed once the pieces
    (`optimizer.shard_fragments`) have separate memory.  While a checkpoint is written, each worker again has the
    complete state of its column, so checkpoints equal Megatron's checkpoints with ``no_shard``.  (With ``optim``
    Megatron 0.19.2 itself computes different results: `hostdevice.flags.outer_sharding`.)

    ``parts``: (model chunk, column, bucket) of each bucket, in the order of the buckets' numbers.
    """

    has_all = True

    def __init__(self, parts: Sequence[tuple[Any, Column, OuterBucket]]) -> None:
        self._parts = parts
        self._chunks = list({id(chunk): chunk for chunk, _, _ in parts}.values())
        self._optimizers: list[Any] = []
        self._params: dict[int, list[list[Any]]] = {}
        """``id`` of an inner optimizer -> Megatron's original parameters, one list per parameter group."""
        self._lent: dict[int, list[dict[str, torch.Tensor]]] = {}

    @property
    def tells_norms(self) -> Column:
        return self._parts[0][1]

    def norm_group(self) -> Any:
        return self._optimizers[0].get_grad_stats_parallel_group()

    def fragments(self, one: Any, groups: dict[Any, int], shadow_device: torch.device | None) -> ShardFragments:
        self._optimizers.append(one)
        self._params[id(one.optimizer)] = [list(group["params"]) for group in one.optimizer.param_groups]
        buckets = {n: bucket for n, (chunk, _, bucket) in enumerate(self._parts) if chunk in one.model_chunks}
        return ShardFragments(one, buckets, {p.orig_param: n for p, n in groups.items()}, shadow_device)

    def adopt(self, fragments: ShardFragments, unit: int, parts: dict[int, Sequence[tuple[int, int]]]) -> None:
        for chunk in self._chunks:
            chunk.param_and_grad_buffer.copy_main_weights_to_model_weights()
        self._borrow(fragments)

    def _borrow(self, fragments: ShardFragments) -> None:
        """Add the complete state of the column to ``fragments``, as pieces that use Megatron's memory."""
        state = fragments.inner.state
        for number, bucket in fragments.buckets.items():
            for one in self._whole(fragments, bucket):
                a, b = bucket.param_to_index[one.orig_param]
                values = {name: _flat(value) for name, value in state.get(one, {}).items()}
                fragments.borrow(LAUNCH, number, one.orig_param, bucket.main[a:b], values)

    def adopted(self) -> None:
        for _, _, bucket in self._parts:
            bucket.release()

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Context in which Megatron's optimizer step does not gather parameters over the shard group."""
        with ExitStack() as replaced:
            for chunk in self._chunks:
                replaced.enter_context(monkeypatch.replaced(chunk, start_param_sync=lambda *_, **__: None))
            yield

    def gathered(self) -> None:
        for chunk in self._chunks:
            chunk.start_param_sync()

    # ---- checkpoints

    @contextmanager
    def loading(self, one: Any, fragments: ShardFragments, held: dict[int, list[ShardFragment]]) -> Iterator[None]:
        """Context in which Megatron loads the column's complete state; on exit that state is cut into ``held``."""
        inner = fragments.inner
        try:
            for bucket in fragments.buckets.values():
                bucket.regain()
            for group, params in zip(inner.param_groups, self._params[id(inner)], strict=True):
                group["params"] = params
            inner.state.clear()
            yield
            self._borrow(fragments)
            for fragment in (fragment for unit in held.values() for fragment in unit):
                a, b = fragment.start, fragment.stop
                (whole,) = fragments.overlapping(fragment.bucket, a, b)
                main = whole.tensor[a - whole.start : b - whole.start]
                fragment.take(a, b, {**whole.give(a, b), "master": main})
            fragments.install(held)
        finally:
            for bucket in fragments.buckets.values():
                bucket.release()

    def lend(self, fragments: ShardFragments, *, moments: bool) -> list[tuple[Column, torch.Tensor]]:
        lent: list[dict[str, torch.Tensor]] = []
        found: list[tuple[Column, torch.Tensor]] = []
        names = MOMENTS if moments else ()
        for number, bucket in fragments.buckets.items():
            # Allocated each time, because operations of an interrupted checkpoint may still write to the old memory.
            tensors = {name: torch.zeros_like(bucket.param_data, dtype=torch.float32) for name in (MAIN, *names)}
            for fragment in fragments.overlapping(number, 0, bucket.param_data.numel()):
                place = slice(fragment.start, fragment.stop)
                tensors[MAIN][place].copy_(fragment.tensor)
                for name in names:
                    if name in fragment.state:
                        tensors[name][place].copy_(fragment.state[name])
            lent.append(tensors)
            found += [(self._parts[number][1], tensor) for tensor in tensors.values()]
        self._lent[id(fragments)] = lent
        return found

    @contextmanager
    def show(self, fragments: ShardFragments) -> Iterator[None]:
        inner = fragments.inner
        held = {fragment.tensor: fragment.state for fragment in fragments}
        groups = [group["params"] for group in inner.param_groups]
        other = next((_without_moments(state) for state in held.values() if state), None)
        before, main = dict(inner.state), list[tuple[Any, torch.Tensor]]()
        try:
            for group, params in zip(inner.param_groups, self._params[id(inner)], strict=True):
                group["params"] = params
            inner.state.clear()
            for bucket, lent in zip(fragments.buckets.values(), self._lent[id(fragments)], strict=True):
                for one in self._whole(fragments, bucket):
                    a, b = bucket.param_to_index[one.orig_param]
                    main.append((one, one._local_tensor))
                    one._local_tensor = lent[MAIN][a:b].view(one._local_tensor.shape)
                    if other is not None:
                        whole = {name: _like(one, lent[name][a:b]) for name in MOMENTS if name in lent}
                        inner.state[one] = whole | other
            yield
        finally:
            for one, without_memory in main:
                one._local_tensor = without_memory
            inner.state.clear()
            inner.state.update(before)
            for group, params in zip(inner.param_groups, groups, strict=True):
                group["params"] = params
            self._lent.pop(id(fragments), None)

    def _whole(self, fragments: ShardFragments, bucket: OuterBucket) -> Iterator[Any]:
        """Yield the parameters of Megatron's optimizer that have elements in ``bucket``."""
        every = (one for group in self._params[id(fragments.inner)] for one in group)
        return (one for one in every if one.orig_param in bucket.param_to_index)


def _flat(value: Any) -> Any:
    local = getattr(value, "_local_tensor", value)
    return local.view(-1) if isinstance(local, torch.Tensor) and local.dim() else local


def _like(parameter: Any, flat: torch.Tensor) -> torch.Tensor:
    """Return a distributed tensor like ``parameter`` whose local part is ``flat``."""
    whole = torch.zeros_like(parameter.data)
    whole._local_tensor = flat.view(whole._local_tensor.shape)
    return whole


def _without_moments(state: dict[str, Any]) -> dict[str, Any]:
    """Return ``state`` without the moments.  Only the number of updates can remain, if it is counted per parameter."""
    return {name: value for name, value in state.items() if name not in MOMENTS}
