"""The host device's attention computes what attention is defined as, and what Megatron's own one does."""

import math

import pytest
import torch

from recover_megatron.hostdevice.attention import (
    attend,
    dealt_positions,
    in_order,
    largest_logits,
    sequences_of,
    visible,
)

LENGTH, HEADS, GROUPS, WIDTH, OF_VALUES = 16, 4, 2, 6, 5


def by_definition(query, key, value, seen, scale, sink=None):
    """Sums over heads and queries, one at a time."""
    rows = []
    for q in range(query.shape[0]):
        row = []
        for head in range(query.shape[2]):
            group = head * key.shape[2] // query.shape[2]
            weights = [
                math.exp(scale * float(query[q, 0, head] @ key[k, 0, group])) * bool(seen[q, k])
                for k in range(key.shape[0])
            ]
            whole = sum(weights) + (0 if sink is None else math.exp(float(sink[head])))
            row.append(sum(w / whole * value[k, 0, group] for k, w in enumerate(weights)))
        rows.append(torch.cat(row))
    return torch.stack(rows).unsqueeze(1)


def operands(values=OF_VALUES, seed=0):
    source = torch.Generator().manual_seed(seed)
    shapes = (LENGTH, 1, HEADS, WIDTH), (LENGTH, 1, GROUPS, WIDTH), (LENGTH, 1, GROUPS, values)
    return [torch.randn(*shape, generator=source, dtype=torch.float64, requires_grad=True) for shape in shapes]


def test_the_largest_logit_of_a_head_is_of_keys_that_are_seen():
    query, key, _ = (tensor.detach() for tensor in operands())
    seen = visible(torch.arange(LENGTH), LENGTH, causal=True)
    expected = [
        max(
            0.3 * float(query[q, 0, head] @ key[k, 0, head * GROUPS // HEADS])
            for q in range(LENGTH)
            for k in range(LENGTH)
            if seen[q, k]
        )
        for head in range(HEADS)
    ]
    assert largest_logits(query, key, seen.view(1, 1, LENGTH, LENGTH), scale=0.3).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("window", [None, (3, 0), (-1, 2), (4, -1)])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("sink", [False, True])
def test_it_is_attention_by_definition(window, packed, sink):
    query, key, value = (tensor.detach() for tensor in operands())
    boundaries = torch.tensor([0, 5, 6, 12], dtype=torch.int32) if packed else None
    seen = visible(torch.arange(LENGTH), LENGTH, causal=True, window=window, boundaries=boundaries)
    number = [0] * 5 + [1] + [2] * 6 + [3] * 4 if packed else [0] * LENGTH
    before, after = (LENGTH if far < 0 else far for far in window or (-1, 0))
    for q in range(LENGTH):
        for k in range(LENGTH):
            assert bool(seen[q, k]) == (q - before <= k <= q + after and number[q] == number[k]), (q, k)
    logits = torch.linspace(-1, 1, HEADS, dtype=torch.float64) if sink else None
    ours = attend(query, key, value, seen.view(1, 1, LENGTH, LENGTH), scale=0.3, sink=logits)
    assert torch.allclose(ours, by_definition(query, key, value, seen, 0.3, logits), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [2, 4])
def test_parts_of_the_context_give_what_the_whole_does_and_the_same_gradients(size):
    whole, parts = operands(), operands()
    dealt = dealt_positions(LENGTH, size)
    expected = attend(*whole, visible(torch.arange(LENGTH), LENGTH, causal=True), scale=0.3)
    key, value = (in_order(torch.cat([tensor[part] for part in dealt]), size) for tensor in parts[1:])
    ours = [attend(parts[0][part], key, value, visible(part, LENGTH, causal=True), scale=0.3) for part in dealt]
    for part, its in zip(dealt, ours, strict=True):
        assert torch.allclose(its, expected[part], rtol=1e-12, atol=1e-14)
    expected.square().sum().backward()
    sum(its.square().sum() for its in ours).backward()
    for mine, theirs in zip(parts, whole, strict=True):
        assert torch.allclose(mine.grad, theirs.grad, rtol=1e-12, atol=1e-12)


def test_padding_behind_the_last_packed_sequence_is_a_sequence_of_its_own():
    assert sequences_of(torch.tensor([0, 2, 2, 3]), torch.arange(5)).tolist() == [0, 0, 2, 3, 3]


def test_a_query_of_packed_cross_attention_sees_the_keys_of_its_own_sequence():
    ends, of_keys = torch.tensor([0, 3, 4]), torch.tensor([0, 1, 6])
    seen = visible(torch.arange(4), 6, causal=False, boundaries=ends, of_keys=of_keys)
    assert seen.int().tolist() == [[1, 0, 0, 0, 0, 0]] * 3 + [[0, 1, 1, 1, 1, 1]]


def test_dropout_draws_from_torchs_default_generator():
    query, key, value = (tensor.detach() for tensor in operands())
    seen = visible(torch.arange(LENGTH), LENGTH, causal=True)

    def drawn(seed):
        torch.manual_seed(seed)
        return attend(query, key, value, seen, scale=0.3, dropout=0.5)

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))


@pytest.mark.slow
def test_it_is_megatrons_own_attention_where_that_one_runs(in_process):
    in_process(
        """
        from types import SimpleNamespace
        import torch
        from recover_megatron import hostdevice
        hostdevice.activate()
        from megatron.core import parallel_state, utils
        from megatron.core.transformer.dot_product_attention import DotProductAttention
        from megatron.core.transformer.enums import AttnMaskType
        from megatron.core.transformer.transformer_config import TransformerConfig
        from recover_megatron.hostdevice.attention import dealt_positions
        parallel_state._set_global_memory_buffer()
        groups = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1), cp=None)

        def outputs(mask, kind=AttnMaskType.causal, keys=8, **settings):
            config = TransformerConfig(num_layers=2, hidden_size=24, num_attention_heads=4, num_query_groups=2,
                                       params_dtype=torch.float64, **{"attention_dropout": 0.0, **settings})
            config.sequence_parallel = True     # no tracker of random states is needed then
            module = DotProductAttention(config, 2, kind, "self", pg_collection=groups)
            module.double()
            torch.manual_seed(1)
            if module.softmax_offset is not None and module.softmax_offset.requires_grad:
                torch.nn.init.normal_(module.softmax_offset)
            both = []
            for ours in (False, True):
                module._own_widths = ours
                torch.manual_seed(2)
                operands = [torch.randn(length, 3, heads, 6, dtype=torch.float64, requires_grad=True)
                            for length, heads in ((8, 4), (keys, 2), (keys, 2))]
                result = module(*operands, mask)
                (result * torch.linspace(0, 1, result.numel(), dtype=torch.float64).view_as(result)).sum().backward()
                offset = module.softmax_offset
                both.append([result, *(o.grad for o in operands),
                             *([] if offset is None or offset.grad is None else [offset.grad])])
                module.zero_grad()
            return both

        masked = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(3)) < 0.3
        masked |= torch.ones(8, 8).triu(1).bool()
        masked &= ~torch.eye(8).bool()
        cases = [
            outputs(None), outputs(masked), outputs(masked, AttnMaskType.padding),
            outputs(None, AttnMaskType.no_mask), outputs(None, window_size=(2, 0)),
            outputs(None, AttnMaskType.no_mask, keys=11), outputs(None, attention_dropout=0.5),
            outputs(None, apply_query_key_layer_scaling=True, attention_softmax_in_fp32=True),
            outputs(None, softmax_type="off-by-one"), outputs(None, softmax_type="learnable"),
        ]
        assert len(cases[-1][0]) == 5
        for number, (theirs, mine) in enumerate(cases):
            for its, ours in zip(theirs, mine, strict=True):
                assert torch.allclose(its, ours, rtol=1e-9, atol=1e-9), (number, (its - ours).abs().max())

        for size in (2, 4):
            for rank in range(size):
                group = SimpleNamespace(size=lambda: size, rank=lambda: rank)
                torch.distributed.get_world_size = lambda group: group.size()
                torch.distributed.get_rank = lambda group: group.rank()
                batch = {"tokens": torch.arange(32).view(1, 32), "cu_seqlens": None}
                dealt = utils.get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group)["tokens"][0]
                assert dealt.tolist() == dealt_positions(32, size)[rank].tolist()
        """
    )
