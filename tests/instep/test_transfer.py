"""A worker's state as a tree, as text and tensors, and its digest: nothing is lost, any changed bit changes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recover_megatron.collectives import state_transport as digest_module
from recover_megatron.collectives.state_transport import bytes_of, digest
from recover_megatron.instep.faults import Disagreement
from recover_megatron.instep.state_holder import flatten, new_memory, unflatten

DTYPES = [
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.int32, torch.bool, torch.uint8,
]  # fmt: skip
SIXTY_FOUR_BITS = 1 << 64


def tensor_of(dtype: torch.dtype, shape: list[int], seed: int) -> torch.Tensor:
    """Any bits, where any are allowed."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    size = dtype.itemsize * int(torch.tensor(shape).prod()) if shape else dtype.itemsize
    bits = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    return bits.view(dtype).view(shape) if size else torch.empty(shape, dtype=dtype)


tensors = st.builds(
    tensor_of, st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3), st.integers(0, 1 << 30)
)
plain = st.one_of(
    st.none(), st.booleans(), st.integers(-(1 << 70), 1 << 70), st.floats(allow_nan=False), st.text(max_size=5)
)
trees = st.recursive(
    st.one_of(tensors, plain),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.one_of(st.text(max_size=3), st.integers()), inner, max_size=4)
    ),
    max_leaves=12,
)


def same(ours: Any, theirs: Any) -> bool:
    """Equal in kind, and tensors bit for bit."""
    if isinstance(ours, torch.Tensor):
        alike = isinstance(theirs, torch.Tensor) and (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        return alike and bytes_of(ours).equal(bytes_of(theirs))
    if isinstance(ours, dict):
        return list(ours) == list(theirs) and all(same(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return type(ours) is type(theirs) and ours == theirs


def carried(tree: Any) -> Any:
    """What arrives if the bytes arrive."""
    text, sent = flatten(tree)
    result, made = unflatten(text, new_memory)
    for mine, its in zip(made, sent, strict=True):
        mine.copy_(its)
    return result


# ---- text and tensors


@given(trees)
@settings(max_examples=100, deadline=None)
def test_a_tree_comes_back_as_it_was(tree: Any) -> None:
    assert same(carried(tree), tree)


def test_tuples_become_lists_and_views_become_whole() -> None:
    base = torch.arange(24.0).view(4, 6)
    result = carried({"views": (base.t(), base[1:, ::2]), 3: torch.tensor(7)})
    assert same(result, {"views": [base.t().contiguous(), base[1:, ::2].contiguous()], 3: torch.tensor(7)})


@pytest.mark.parametrize(
    "bad",
    [{1.5: 0}, {"a": object()}, {(1, 2): 0}, [{"x": {1, 2}}], b"bytes"],
    ids=["number as key", "object", "tuple as key", "set", "bytes"],
)
def test_what_cannot_be_told_in_text_is_refused(bad: Any) -> None:
    with pytest.raises(TypeError):
        flatten(bad)


def test_tensors_out_of_order_are_refused() -> None:
    text, _ = flatten([torch.zeros(1), torch.zeros(1)])
    with pytest.raises(Disagreement):
        unflatten(text.replace('"tensor": 0', '"tensor": 7'), new_memory)


# ---- the digest


@given(tensors.filter(lambda tensor: tensor.numel() > 0 and tensor.dtype is not torch.bool), st.data())
@settings(max_examples=150, deadline=None)
def test_any_flipped_bit_changes_the_digest(tensor: torch.Tensor, data: st.DataObject) -> None:
    changed = tensor.clone()
    view = bytes_of(changed)
    view[data.draw(st.integers(0, view.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
    around = [torch.ones(3), tensor, torch.zeros(2)]
    assert digest(around) != digest([around[0], changed, around[2]])


@pytest.mark.parametrize("word", [0, 1, (1 << 15) - 1, 1 << 15, (3 << 15) + 5, (1 << 23) + 7])
def test_every_bit_of_a_word_counts_wherever_it_is(word: int) -> None:
    tensor = torch.zeros((1 << 23) + 8, dtype=torch.int64)  # more than is looked at in one call
    before = digest([tensor])
    found = set()
    for bit in (0, 31, 32, 62, 63):
        tensor[word] = 1 << bit if bit < 63 else -(1 << 63)
        found.add(digest([tensor]))
    assert len(found) == 5
    assert before not in found


def test_the_order_and_the_lengths_change_the_digest() -> None:
    a, b = torch.arange(5.0), torch.arange(1.0, 6.0)
    assert digest([a, b]) != digest([b, a])
    assert digest([torch.cat([a, b])]) != digest([a, b])
    assert digest([torch.zeros(4)]) != digest([torch.zeros(5)])
    assert digest([torch.zeros(4), torch.empty(0)]) != digest([torch.zeros(4)])
    swapped = torch.arange(1 << 17)
    swapped[[3, (1 << 16) + 3]] = swapped[[(1 << 16) + 3, 3]]  # the same column of two rows
    assert digest([swapped]) != digest([torch.arange(1 << 17)])


def test_the_digest_does_not_depend_on_where_a_tensor_lies() -> None:
    base = torch.arange(100, dtype=torch.int16).to(torch.bfloat16)
    for start in range(1, 9):
        part = base[start : start + 50]  # words of 64 bits do not begin here
        assert digest([part]) == digest([part.clone()])
    matrix = torch.arange(12.0).view(3, 4)
    assert digest([matrix.t()]) == digest([matrix.t().contiguous()])


def test_other_devices_sum_rows_to_the_same() -> None:
    rows = torch.randint(-(1 << 63), (1 << 63) - 1, (5, 64))
    factors = torch.arange(1, 129, 2) * 0x9E3779B1
    assert digest_module._row_sums(rows, factors) == (rows * factors).sum(1).tolist()
