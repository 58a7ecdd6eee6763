"""Megatron-FSDP's --outer-dp-sharding-strategy optim: the optimizer's state is spread over the shard groups, too."""

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
    """This worker's shard of one of Megatron-FSDP's parameter groups, as `shard_fragments` knows buckets."""

    group: Any
    param_to_index: dict[Any, tuple[int, int]] = field(init=False)
    """Parameter -> the elements of the shard that are its own; without those that have none here."""

    def __post_init__(self) -> None:
        its = self.group.main_grad_buffer
        ranges = {p: its._get_item_local_shard_index(item) for item, p in enumerate(self.group.params)}
        first = its.shard_bucket_index.local_data_index
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
        """The 32-bit parameters that Megatron's own optimizer would update, flat; without memory once released."""
        shard: torch.Tensor = self.group.main_weight_buffer.get_shard_from_local_buffer()
        return shard

    def release(self) -> None:
        """Give up the memory of ``main``, until ``regain``."""
        self.group.main_weight_buffer.data.untyped_storage().resize_(0)

    def regain(self) -> None:
        """Have memory for ``main`` again, zeroed."""
        whole = self.group.main_weight_buffer.data
        whole.untyped_storage().resize_(whole.numel() * whole.element_size())
        whole.zero_()


LAUNCH = -1
"""The unit under which all that Megatron has is held, until it is cut."""
MAIN, MOMENTS = "main", ("exp_avg", "exp_avg_sq")


class InShardGroups(Keeping):
    """--outer-dp-sharding-strategy optim: the optimizer's state is spread over the shard groups, too, and has shadows.

        worker's shard of a buffer   |--------------- inner shard ---------------|    equal in its column of K workers
        main parameters, moments     |== unit 0 ==|== unit 1 ==| .. |= unit K-1 =|    each at its owner and its shadows

    Megatron is built as for ``no_shard`` (`state`): a shard group has all gradients and the model's parameters, as with
    ``optim``, too.  What it keeps of the state, main parameters and moments, is given up once the pieces
    (`optimizer.shard_fragments`) have memory of their own; for a checkpoint each worker has all that its column shares
    again, as long as it is written.  So what is saved is what Megatron saves with ``no_shard``.  (Megatron 0.19.2
    itself trains something else with this flag: `hostdevice.flags.outer_sharding`.)

    ``parts``: (model chunk, column, bucket) of each bucket, by its number.
    """

    has_all = True

    def __init__(self, parts: Sequence[tuple[Any, Column, OuterBucket]]) -> None:
        self._parts = parts
        self._chunks = list({id(chunk): chunk for chunk, _, _ in parts}.values())
        self._optimizers: list[Any] = []
        self._params: dict[int, list[list[Any]]] = {}
        """Optimizer -> the parameters of each of its groups, as Megatron made them."""
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
        """Hold all that Megatron has of the state, in its memory."""
        state = fragments.inner.state
        for number, bucket in fragments.buckets.items():
            for its in self._whole(fragments, bucket):
                a, b = bucket.param_to_index[its.orig_param]
                values = {name: _flat(value) for name, value in state.get(its, {}).items()}
                fragments.borrow(LAUNCH, number, its.orig_param, bucket.main[a:b], values)

    def adopted(self) -> None:
        for _, _, bucket in self._parts:
            bucket.release()

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Without the gathering of parameters in the shard group, with which Megatron ends its step."""
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
        """As at launch: Megatron has memory for all that the column shares, and reads it; then it is cut."""
        inner = fragments.inner
        try:
            for bucket in fragments.buckets.values():
                bucket.regain()
            for group, params in zip(inner.param_groups, self._params[id(inner)], strict=True):
                group["params"] = params
            inner.state.clear()
            yield
            self._borrow(fragments)
            for fragment in (fragment for its in held.values() for fragment in its):
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
            # New memory each time: where a checkpoint is interrupted, others may still write to what it had.
            its = {name: torch.zeros_like(bucket.param_data, dtype=torch.float32) for name in (MAIN, *names)}
            for fragment in fragments.overlapping(number, 0, bucket.param_data.numel()):
                place = slice(fragment.start, fragment.stop)
                its[MAIN][place].copy_(fragment.tensor)
                for name in names:
                    if name in fragment.state:
                        its[name][place].copy_(fragment.state[name])
            lent.append(its)
            found += [(self._parts[number][1], tensor) for tensor in its.values()]
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
                for its in self._whole(fragments, bucket):
                    a, b = bucket.param_to_index[its.orig_param]
                    main.append((its, its._local_tensor))
                    its._local_tensor = lent[MAIN][a:b].view(its._local_tensor.shape)
                    if other is not None:
                        whole = {name: _like(its, lent[name][a:b]) for name in MOMENTS if name in lent}
                        inner.state[its] = whole | other
            yield
        finally:
            for its, without_memory in main:
                its._local_tensor = without_memory
            inner.state.clear()
            inner.state.update(before)
            for group, params in zip(inner.param_groups, groups, strict=True):
                group["params"] = params
            self._lent.pop(id(fragments), None)

    def _whole(self, fragments: ShardFragments, bucket: OuterBucket) -> Iterator[Any]:
        """Megatron's own parameters of the optimizer that have elements in a bucket."""
        every = (its for group in self._params[id(fragments.inner)] for its in group)
        return (its for its in every if its.orig_param in bucket.param_to_index)


def _flat(value: Any) -> Any:
    local = getattr(value, "_local_tensor", value)
    return local.view(-1) if isinstance(local, torch.Tensor) and local.dim() else local


def _like(parameter: Any, flat: torch.Tensor) -> torch.Tensor:
    """A distributed tensor as ``parameter`` is one, whose part here is ``flat``."""
    whole = torch.zeros_like(parameter.data)
    whole._local_tensor = flat.view(whole._local_tensor.shape)
    return whole


def _without_moments(state: dict[str, Any]) -> dict[str, Any]:
    """How many updates there were, where the optimizer counts them by parameter."""
    return {name: value for name, value in state.items() if name not in MOMENTS}
