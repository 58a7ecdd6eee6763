"""Sums that are set aside for a re-run need no memory that the device has not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recover_megatron.collectives.ledger import Memory
from recover_megatron.instep.gradients import Gradients

COLUMN = (0, 1)


class Full(Memory):
    """A device with room for ``left`` bytes of copies, which says so only by refusing."""

    def __init__(self, left: int) -> None:
        self.left = left
        self.to_host: list[torch.Tensor] = []

    def on_device(self, values: torch.Tensor) -> torch.Tensor:
        if values.nbytes > self.left:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more than there is")
        self.left -= values.nbytes
        return super().on_device(values)

    def on_host(self, values: torch.Tensor) -> torch.Tensor:
        self.to_host.append(super().on_host(values))
        return self.to_host[-1]


@pytest.mark.parametrize("left", [0, 40, 1000])
def test_what_the_device_has_no_room_for_is_kept_on_the_host_and_comes_back(left: int) -> None:
    flats = [torch.arange(10.0), torch.arange(100.0, 110.0), torch.arange(200.0, 210.0)]
    memory = Full(left)
    gradients = Gradients([(COLUMN, flat) for flat in flats], memory=memory)
    finished = ((0, 10), (2, 8), (0, 10))
    for (_, bucket), (start, stop) in zip(gradients._parts, finished, strict=True):
        bucket.ledger.mark(range(start, stop), 1)
    expected = [flat.clone() for flat in flats]
    kept = gradients.set_aside()
    assert len(memory.to_host) == {0: 3, 40: 2, 1000: 0}[left]
    assert sum(aside.nbytes for aside in kept) == 4 * 26
    for flat in flats:
        flat.add_(1.0)  # the lost microbatches
    for aside in kept:
        aside.put_back()
    for flat, before, (start, stop) in zip(flats, expected, finished, strict=True):
        assert torch.equal(flat[start:stop], before[start:stop])
    assert flats[1][:2].tolist() == [101.0, 102.0], "what was not finished has the lost microbatches"


@pytest.mark.parametrize(("free", "beside", "room"), [(59, 0, False), (60, 0, True), (60, 1, False)])
def test_a_copy_stays_on_a_gpu_only_beside_the_most_that_was_ever_allocated_and_other_copies(
    monkeypatch: pytest.MonkeyPatch, free: int, beside: int, room: bool
) -> None:
    """The re-run's passes need that once more; the allocator would give it away now."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 200))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 120)
    values: Any = SimpleNamespace(device=torch.device("cuda", 0), nbytes=40)
    assert Memory().has_room(values, beside) is room


def test_memory_that_cannot_be_pinned_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def no_pins(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", no_pins)
    assert Memory().on_host(torch.ones(3)).tolist() == [1.0, 1.0, 1.0]
