"""--outer-dp-sharding-strategy optim of Megatron-FSDP: what becomes of an optimizer's state, without a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recover_megatron.megatron_hooks.fsdp.outer import MOMENTS, InShardGroups, OuterBucket

RANGES = [(0, 3), (3, 8)]
"""The elements of each parameter; all are in this worker's shard."""


class Buffer:
    """One of Megatron-FSDP's: 8 elements, two parameters."""

    shard_bucket_index = SimpleNamespace(local_data_index=0)

    def __init__(self, dtype: torch.dtype) -> None:
        self.data = torch.zeros(8, dtype=dtype)

    def _get_item_local_shard_index(self, item: int) -> tuple[int, int]:
        return RANGES[item]

    def get_shard_from_local_buffer(self) -> torch.Tensor:
        return self.data


class Megatron:
    """Its optimizer and its buffers, whose main parameters are views of one of them, as those of its tensors are."""

    def __init__(self, dtype: torch.dtype) -> None:
        params = [torch.nn.Parameter(torch.zeros(stop - start, dtype=dtype)) for start, stop in RANGES]
        model, main = Buffer(dtype), Buffer(torch.float32)
        self.model, self.main = model.data, main.data
        group = SimpleNamespace(
            params=params, main_grad_buffer=Buffer(torch.float32), model_weight_buffer=model, main_weight_buffer=main
        )
        buffer = SimpleNamespace(copy_main_weights_to_model_weights=self.show)
        self.masters = [torch.nn.Parameter(main.data[start:stop]) for start, stop in RANGES]
        for master, param in zip(self.masters, params, strict=True):
            master.orig_param = param  # type: ignore[attr-defined]
        chunk = SimpleNamespace(param_and_grad_buffer=buffer)
        self.optimizer: Any = SimpleNamespace(
            optimizer=torch.optim.Adam(self.masters), model_chunks=[chunk], tp_group=SimpleNamespace(rank=lambda: 0)
        )
        self.keeping = InShardGroups([(chunk, (0, 1), OuterBucket(group))])
        groups = dict.fromkeys(self.masters, 0)
        self.fragments = self.keeping.fragments(self.optimizer, groups, torch.device("cpu"))

    def show(self) -> None:
        self.model.copy_(self.main)

    def load(self, values: torch.Tensor) -> None:
        """As from a checkpoint: into what it has, by way of new groups and states."""
        inner = self.optimizer.optimizer
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        inner.step()
        inner.load_state_dict(inner.state_dict())
        self.main.copy_(values)
        for master, (start, stop) in zip(self.masters, RANGES, strict=True):
            inner.state[master]["step"].fill_(7)
            for factor, name in enumerate(MOMENTS, 2):
                inner.state[master][name].copy_(factor * values[start:stop])
        self.show()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("readable", [True, False])
def test_who_goes_back_reads_all_that_its_column_shares_and_keeps_its_parts(dtype: torch.dtype, readable: bool) -> None:
    """Of what was there before nothing is left, a shadow in host memory is one of what was read, and the room for all
    the rest is given up: also where the checkpoint cannot be read."""
    its = Megatron(dtype)
    its.main.copy_(torch.full((8,), 99.0))
    its.keeping.adopt(its.fragments, 0, {})
    its.fragments.install({0: its.fragments.make({0: [(0, 8)]}, shadow=False)})
    its.keeping.adopted()
    assert its.main.untyped_storage().nbytes() == 0

    its.fragments.install({})
    held = {unit: its.fragments.make({0: [part]}, shadow=unit > 0) for unit, part in enumerate([(2, 6), (6, 8)])}
    read = torch.arange(1.0, 9.0) / 4

    def go_back() -> None:
        with torch.no_grad(), its.keeping.loading(its.optimizer, its.fragments, held):
            its.load(read)
            if not readable:
                raise ValueError("cut short")

    if readable:
        go_back()
    else:
        with pytest.raises(ValueError, match="cut short"):
            go_back()
    assert its.main.untyped_storage().nbytes() == 0
    if not readable:
        return
    assert [(one.start, one.stop) for one in its.fragments] == [(2, 3), (3, 6), (6, 8)]
    updated = [one for one in its.fragments if not one.on_shadow_device]
    assert its.optimizer.optimizer.param_groups[0]["params"] == [one.tensor for one in updated]
    for one in its.fragments:
        part = read[one.start : one.stop]
        assert torch.equal(one.tensor, part)
        for factor, name in enumerate(MOMENTS, 2):
            assert torch.equal(one.state[name], factor * part)
        assert one.state["step"] == 7
