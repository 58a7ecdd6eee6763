"""Megatron-FSDP: memory into which an operation that was left may still write is not freed under it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer as fsdp

from recover_megatron.megatron_hooks.fsdp.state import abandon

ALLOCATORS = fsdp.TemporaryBucketAllocator, fsdp.StorageResizeBasedBucketAllocator


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_a_bucket_of_an_interrupted_iteration_keeps_its_memory_and_the_next_one_gets_other(allocator: Any) -> None:
    buckets = allocator()
    held = buckets.allocate(3, 8, torch.float32, torch.device("cpu")).data  # as an operation of gloo's holds it
    held.fill_(1.0)
    abandon(SimpleNamespace(temporary_bucket_allocator=buckets, bucket_index=SimpleNamespace(bucket_id=3)))
    assert held.untyped_storage().nbytes() == 32
    again = buckets.allocate(3, 8, torch.float32, torch.device("cpu")).data
    held.fill_(7.0)  # a late write
    assert again.untyped_storage().data_ptr() != held.untyped_storage().data_ptr()
    buckets.free(3)
    assert held.untyped_storage().nbytes() == 32


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_megatron_itself_frees_a_bucket_whoever_holds_it(allocator: Any) -> None:
    """Why ``abandon`` is there."""
    buckets = allocator()
    held = buckets.allocate(3, 8, torch.float32, torch.device("cpu")).data
    buckets.free(3)
    assert held.untyped_storage().nbytes() == 0
