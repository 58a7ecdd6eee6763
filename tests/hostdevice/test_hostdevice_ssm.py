"""The host device's layers with a state compute what their recurrences say, step by step in float64."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from recover_megatron.hostdevice.ssm import (
    GatedRMSNorm,
    causal_conv1d_fn,
    chunk_gated_delta_rule,
    delta_conv1d,
    l2norm,
    mamba_chunk_scan_combined,
    mamba_split_conv1d_scan_combined,
)

BATCH, LENGTH, HEADS, WIDTH, GROUPS, STATE = 2, 11, 4, 3, 2, 5
SEQUENCES = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 2], [0, 0, 1, 1, 1, 1, 1, 1, 1, 3, 3]])
"""The second sequence of the first row is within a chunk of four and across its end."""


def drawn(*shape: int, grad: bool = True) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=grad)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def scanned(x, dt, A, B, C, D=None, z=None, dt_bias=None, first=None, sequences=None, softplus=False, limit=None):
    """(y, last states): one position, row and head after the other."""
    rows, states = [], []
    for row in range(x.shape[0]):
        heads, lasts = [], []
        for head in range(x.shape[2]):
            group = head * B.shape[2] // x.shape[2]
            state = x.new_zeros(x.shape[3], B.shape[3]) if first is None else first[row, head]
            positions = []
            for at in range(x.shape[1]):
                if sequences is not None and at and sequences[row, at] != sequences[row, at - 1]:
                    state = torch.zeros_like(state)
                step = dt[row, at, head] + (0 if dt_bias is None else dt_bias[head])
                step = F.softplus(step) if softplus else step
                step = step if limit is None else step.clamp(*limit)
                state = (step * A[head]).exp() * state
                state = state + step * torch.outer(x[row, at, head], B[row, at, group])
                y = state @ C[row, at, group]
                y = y if D is None else y + D[head] * x[row, at, head]
                y = y if z is None else y * F.silu(z[row, at, head])
                positions.append(y)
            heads.append(torch.stack(positions))
            lasts.append(state)
        rows.append(torch.stack(heads, dim=1))
        states.append(torch.stack(lasts))
    return torch.stack(rows), torch.stack(states)


def operands() -> list[torch.Tensor]:
    dt = torch.rand(BATCH, LENGTH, HEADS, dtype=torch.float64).requires_grad_()
    A = (-torch.rand(HEADS, dtype=torch.float64) - 0.5).requires_grad_()
    return [drawn(BATCH, LENGTH, HEADS, WIDTH), dt, A, *(drawn(BATCH, LENGTH, GROUPS, STATE) for _ in range(2))]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor], leaves: list[torch.Tensor]) -> None:
    """Values, and the gradients of a random sum of them."""
    weights = [torch.randn_like(its) for its in theirs]
    gradients = []
    for values in (ours, theirs):
        total = sum((its * weight).sum() for its, weight in zip(values, weights, strict=True))
        gradients.append(torch.autograd.grad(total, leaves))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("chunk", [1, 4, 11, 64])
@pytest.mark.parametrize("several", [False, True])
def test_a_scan_is_the_recurrence(chunk: int, several: bool) -> None:
    its, sequences = operands(), SEQUENCES if several else None
    ours = mamba_chunk_scan_combined(*its, chunk, seq_idx=sequences, return_final_states=True)
    same(list(ours), list(scanned(*its, sequences=sequences)), its)


@pytest.mark.parametrize("wide_d", [False, True])
def test_a_scan_takes_what_goes_with_it(wide_d: bool) -> None:
    its = operands()
    D, z, bias = drawn(HEADS, WIDTH) if wide_d else drawn(HEADS), drawn(BATCH, LENGTH, HEADS, WIDTH), drawn(HEADS)
    first, limit = drawn(BATCH, HEADS, WIDTH, STATE), (0.4, 1.5)
    ours = mamba_chunk_scan_combined(
        *its, 4, D, z, bias, first, dt_softplus=True, dt_limit=limit, return_final_states=True
    )
    theirs = scanned(*its, D, z, bias, first, softplus=True, limit=limit)
    same(list(ours), list(theirs), [*its, D, z, bias, first])


def test_a_scan_has_its_derivatives() -> None:
    x, dt, A, B, C = operands()
    few = [x[:1, :5, :2, :2], dt[:1, :5, :2], A[:2], B[:1, :5, :, :2], C[:1, :5, :, :2]]
    leaves = [its.detach().clone().requires_grad_() for its in few]
    assert torch.autograd.gradcheck(
        lambda *its: mamba_chunk_scan_combined(*its, 2, seq_idx=SEQUENCES[:1, :5]), leaves, fast_mode=True
    )


def test_a_state_is_rounded_only_where_a_chunk_reads_it() -> None:
    its = [each.detach().float() for each in operands()]
    whole, _ = mamba_chunk_scan_combined(*its, 64, return_final_states=True)
    rounded, last = mamba_chunk_scan_combined(*its, 4, state_dtype=torch.bfloat16, return_final_states=True)
    torch.testing.assert_close(rounded[:, :4], whole[:, :4])
    assert not torch.equal(rounded[:, 4:], whole[:, 4:])
    torch.testing.assert_close(rounded, whole, rtol=0.05, atol=0.05)
    assert last.dtype == torch.float32


def test_half_precision_goes_in_and_out_and_the_state_is_in_32_bits() -> None:
    its = [each.detach().float() for each in operands()]
    half = [each.bfloat16() for each in its]
    y, last = mamba_chunk_scan_combined(*half, 4, return_final_states=True)
    wide, its_last = mamba_chunk_scan_combined(*(each.float() for each in half), 4, return_final_states=True)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, wide.bfloat16())
    assert torch.equal(last, its_last)


def convolved(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, sequences: torch.Tensor) -> torch.Tensor:
    """[batch, channels, length], position by position."""
    out = torch.zeros_like(x)
    for row in range(x.shape[0]):
        for at in range(x.shape[2]):
            total = bias.clone()
            for back in range(min(weight.shape[1], at + 1)):
                if sequences[row, at - back] == sequences[row, at]:
                    total = total + weight[:, -1 - back] * x[row, :, at - back]
            out[row, :, at] = F.silu(total)
    return out


def test_a_convolution_is_of_the_latest_positions_of_the_same_sequence() -> None:
    x, weight, bias = drawn(BATCH, 6, LENGTH), drawn(6, 4), drawn(6)
    for sequences in (SEQUENCES, torch.zeros_like(SEQUENCES)):
        ours = causal_conv1d_fn(x, weight, bias, sequences, "silu")
        same([ours], [convolved(x, weight, bias, sequences)], [x, weight, bias])
    assert torch.equal(ours, causal_conv1d_fn(x, weight, bias, activation="swish"))
    theirs = F.conv1d(x, weight.unsqueeze(1), padding=3, groups=6)[..., :LENGTH]
    torch.testing.assert_close(causal_conv1d_fn(x, weight), theirs)


@pytest.mark.parametrize("wide_d", [False, True])
@pytest.mark.parametrize("several", [False, True])
def test_the_mixer_is_split_convolution_scan_and_gate(several: bool, wide_d: bool) -> None:
    inner, both = HEADS * WIDTH, GROUPS * STATE
    channels = inner + 2 * both
    joined = drawn(BATCH, LENGTH, inner + channels + HEADS)
    weight, bias, dt_bias, D = drawn(channels, 4), drawn(channels), drawn(HEADS), drawn(HEADS, *[WIDTH] * wide_d)
    A = (-torch.rand(HEADS, dtype=torch.float64) - 0.5).requires_grad_()
    sequences = SEQUENCES if several else torch.zeros_like(SEQUENCES)
    ours = mamba_split_conv1d_scan_combined(
        joined, weight, bias, dt_bias, A, D, 4, seq_idx=SEQUENCES if several else None,
        headdim=None if wide_d else WIDTH, ngroups=GROUPS, norm_before_gate=False,
    )  # fmt: skip
    z, xBC, dt = joined[..., :inner], joined[..., inner : inner + channels], joined[..., inner + channels :]
    xBC = convolved(xBC.transpose(1, 2), weight, bias, sequences).transpose(1, 2)
    x, z = (its.reshape(BATCH, LENGTH, HEADS, WIDTH) for its in (xBC[..., :inner], z))
    B, C = (its.reshape(BATCH, LENGTH, GROUPS, STATE) for its in (xBC[..., inner:-both], xBC[..., -both:]))
    y, _ = scanned(x, dt, A, B, C, D, z, dt_bias, sequences=sequences, softplus=True)
    same([ours], [y.reshape(BATCH, LENGTH, inner)], [joined, weight, bias, dt_bias, A, D])


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("size", [None, 4])
def test_a_gated_norm_is_of_each_group(size: int | None, before: bool) -> None:
    norm = GatedRMSNorm(12, eps=1e-3, group_size=size, norm_before_gate=before, dtype=torch.float64)
    torch.nn.init.normal_(norm.weight)
    x, z = drawn(3, 12), drawn(3, 12)

    def by_hand(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        x = x if before else x * gate
        parts = [part / (part.square().mean(-1, keepdim=True) + 1e-3).sqrt() for part in x.split(size or 12, dim=-1)]
        return torch.cat(parts, dim=-1) * norm.weight * (gate if before else 1)

    same([norm(x, z)], [by_hand(x, F.silu(z))], [x, z, norm.weight])
    torch.testing.assert_close(norm(x), by_hand(x, torch.ones_like(x)))


@pytest.mark.parametrize("boundaries", [None, [0, 3, 5, 11]])
def test_the_delta_rule_corrects_what_a_key_recalls(boundaries: list[int] | None) -> None:
    rows = 1 if boundaries else BATCH
    q, k = (drawn(rows, LENGTH, HEADS, STATE) for _ in range(2))
    v, g, beta = drawn(rows, LENGTH, HEADS, WIDTH), drawn(rows, LENGTH, HEADS), drawn(rows, LENGTH, HEADS)
    starts = torch.tensor(boundaries) if boundaries else None
    ours, _ = chunk_gated_delta_rule(q, k, v, g=g, beta=beta, cu_seqlens=starts)
    theirs = torch.zeros_like(v)
    for row in range(rows):
        for head in range(HEADS):
            for first, end in pairwise(boundaries or [0, LENGTH]):
                state = torch.zeros(WIDTH, STATE, dtype=torch.float64)
                for at in range(first, end):
                    key = k[row, at, head]
                    state = g[row, at, head].exp() * state  # (1 - beta k k^T) and + beta v k^T, as it is published
                    forgets = torch.eye(STATE, dtype=torch.float64) - beta[row, at, head] * torch.outer(key, key)
                    state = state @ forgets + beta[row, at, head] * torch.outer(v[row, at, head], key)
                    theirs[row, at, head] = state @ q[row, at, head] / STATE**0.5
    same([ours], [theirs], [q, k, v, g, beta])


def test_what_goes_with_the_delta_rule() -> None:
    x, weight = drawn(1, LENGTH, 6), drawn(6, 4)
    ours, state = delta_conv1d(x, weight, activation="silu", cu_seqlens=torch.tensor([0, 3, 5, 11]))
    theirs = convolved(x.transpose(1, 2), weight, weight.new_zeros(6), SEQUENCES[:1]).transpose(1, 2)
    same([ours], [theirs], [x, weight])
    assert state is None
    torch.testing.assert_close(l2norm(x), x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt())
