"""Recurrent layers in torch, which replace functions of mamba_ssm, causal_conv1d (Mamba 2) and fla (delta net).

The functions are written from the recurrences, and have only the arguments that Megatron uses in training.  They
compute in float32, or in float64 for float64 inputs; the output has the input's dtype.  Sequences that are packed into
one row (``seq_idx``, ``cu_seqlens``) do not influence each other.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from recover_megatron.hostdevice.attention import sequences_of


def _wide(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Convert all tensors to float32, or to float64 if the first tensor has this dtype."""
    return [tensor.to(torch.promote_types(tensors[0].dtype, torch.float32)) for tensor in tensors]


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """Convolve each channel with its weights, over each position and the positions before it.

    Args:
        x: [batch, channels, length].
        weight: [channels, width]; a channel's last weight is for the position itself.
        bias: [channels].
        seq_idx: [batch, length], number of the packed sequence at each position.
        activation: None, "silu" or "swish".
    """
    before = weight.shape[1] - 1
    wide, taps = _wide(x, weight)
    windows = F.pad(wide, (before, 0)).unfold(-1, before + 1, 1)
    if seq_idx is not None:
        numbers = F.pad(seq_idx, (before, 0), value=-1).unfold(-1, before + 1, 1)
        windows = windows * (numbers == seq_idx.unsqueeze(-1)).unsqueeze(1)
    out = (windows * taps.unsqueeze(1)).sum(-1)
    if bias is not None:
        out = out + bias.to(out.dtype).unsqueeze(-1)
    assert activation in (None, "silu", "swish")
    return (out if activation is None else F.silu(out)).to(x.dtype)


def mamba_chunk_scan_combined(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
    state_dtype: torch.dtype | None = None,
) -> Any:
    """Compute y_t = C_t h_t + D x_t, times silu(z_t), where h_t = exp(dt_t A) h_(t-1) + dt_t B_t x_t.

    Within a chunk of ``chunk_size`` positions, this is a matrix product over all pairs of positions; the state h is
    passed from chunk to chunk.

    Args:
        x: [batch, length, heads, width]; ``z`` has the same shape.
        dt: [batch, length, heads]; before use, ``dt_bias`` [heads] is added, softplus is applied (``dt_softplus``), and
            the result is clamped to ``dt_limit``.
        A: [heads], negative.
        B: [batch, length, groups, state size]; ``C`` has the same shape; ``heads // groups`` consecutive heads use the
            same group.
        D: [heads] or [heads, width].
        initial_states: [batch, heads, width, state size], state before the first sequence of each row.
        state_dtype: dtype to which the state is rounded when a chunk reads it.

    Returns:
        y, with the shape and dtype of ``x``; with ``return_final_states``, y and the last states.
    """
    heads, groups = x.shape[2], B.shape[2]
    wide, dt, A, B, C = _wide(x, dt, A, B, C)
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    B, C = (part.repeat_interleave(heads // groups, dim=2) for part in (B, C))
    driven, exponents = wide * dt.unsqueeze(-1), dt * A
    sequence = torch.zeros(x.shape[:2], dtype=torch.int64) if seq_idx is None else seq_idx.expand(x.shape[:2])
    state = wide.new_zeros(x.shape[0], *x.shape[2:], B.shape[-1]) if initial_states is None else initial_states
    state = state.to(wide.dtype)
    of_state, outs = sequence[:, 0], []
    for first in range(0, x.shape[1], chunk_size):
        at = slice(first, first + chunk_size)
        numbers, decay = sequence[:, at], exponents[:, at].cumsum(1)
        sees = (numbers.unsqueeze(2) == numbers.unsqueeze(1)).tril().unsqueeze(-1)
        pairs = (decay.unsqueeze(2) - decay.unsqueeze(1)).masked_fill(~sees, -torch.inf).exp()
        reached = decay.exp() * (numbers == of_state.unsqueeze(1)).unsqueeze(-1)
        read = state.to(state_dtype or state.dtype).to(state.dtype)
        within = torch.einsum("bihn,bjhn,bijh,bjhp->bihp", C[:, at], B[:, at], pairs, driven[:, at])
        outs.append(within + torch.einsum("bihn,bhpn,bih->bihp", C[:, at], read, reached))
        added = torch.einsum("bjhn,bjh,bjhp->bhpn", B[:, at], pairs[:, -1], driven[:, at])
        state = state * reached[:, -1, :, None, None] + added
        of_state = numbers[:, -1]
    y = torch.cat(outs, dim=1)
    if D is not None:
        y = y + wide * D.to(y.dtype).view(heads, -1)
    if z is not None:
        y = y * F.silu(z.to(y.dtype))
    return (y.to(x.dtype), state) if return_final_states else y.to(x.dtype)


def mamba_split_conv1d_scan_combined(
    zxbcdt: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor | None,
    dt_bias: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    chunk_size: int,
    *,
    seq_idx: torch.Tensor | None = None,
    activation: str = "silu",
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
    state_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute the part of Mamba's mixer between its two projections.

    ``zxbcdt`` is [batch, length, z x B C dt], with z, x, B, C and dt concatenated; the result is [batch, length,
    heads * width].  x, B and C are convolved first.  ``headdim`` may be None if ``D`` is [heads, width].  There is no
    norm, so ``norm_before_gate`` has no effect.
    """
    heads, width = A.shape[0], headdim or D.shape[1]
    inner = heads * width
    both = (zxbcdt.shape[-1] - 2 * inner - heads) // 2
    z, xBC, dt = zxbcdt.split([inner, inner + 2 * both, heads], dim=-1)
    mixed = causal_conv1d_fn(xBC.transpose(1, 2), conv1d_weight, conv1d_bias, seq_idx, activation).transpose(1, 2)
    x, B, C = mixed.split([inner, both, both], dim=-1)
    x, z = (part.unflatten(-1, (heads, width)) for part in (x, z))
    B, C = (part.unflatten(-1, (ngroups, -1)) for part in (B, C))
    y = mamba_chunk_scan_combined(
        x, dt, A, B, C, chunk_size, D, z, dt_bias, None, seq_idx, dt_softplus=True, state_dtype=state_dtype
    )
    return y.flatten(2)


class GatedRMSNorm(torch.nn.Module):
    """Root-mean-square norm of each group of numbers, multiplied by silu of a gate if a gate is given.

    ``group_size``: numbers per group; None if there is only one group.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.group_size, self.norm_before_gate = eps, group_size or hidden_size, norm_before_gate
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))

    def forward(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        wide, weight = _wide(x, self.weight)
        gate = 1 if z is None else F.silu(z.to(wide.dtype))
        if not self.norm_before_gate:
            wide = wide * gate
        groups = wide.unflatten(-1, (-1, self.group_size))
        normed = F.rms_norm(groups, (self.group_size,), eps=self.eps).flatten(-2) * weight
        return (normed * gate if self.norm_before_gate else normed).to(x.dtype)


# ---- gated delta net
def _only_training(*given: Any) -> None:
    if any(argument is not None and argument is not False for argument in given):
        raise NotImplementedError("the host device's gated delta net supports no initial or final state: training only")


def delta_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    initial_state: None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, None]:
    """Apply ``causal_conv1d_fn`` to x [batch, length, channels], with fla's arguments and result.

    ``cu_seqlens``: boundaries of packed sequences (see ``sequences_of``).
    """
    _only_training(initial_state, output_final_state)
    seq_idx = None if cu_seqlens is None else sequences_of(cu_seqlens, torch.arange(x.shape[1])).unsqueeze(0)
    return causal_conv1d_fn(x.transpose(1, 2), weight, bias, seq_idx, activation).transpose(1, 2), None


def l2norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    (wide,) = _wide(x)
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, None]:
    """Compute y_t = scale q_t S_t, where S_t = D_t + k_t * beta_t (v_t - k_t D_t) and D_t = exp(g_t) S_(t-1).

    Positions are processed one after the other.  q and k are [batch, length, heads, key width], v is [batch, length,
    heads, value width], g and beta are [batch, length, heads].  ``scale`` is by default 1 / sqrt(key width).
    """
    _only_training(initial_state, output_final_state, use_qk_l2norm_in_kernel)
    starts = set() if cu_seqlens is None else set(cu_seqlens.tolist())
    wide_q, wide_k, wide_v, decay, beta = _wide(q, k, v, g.exp(), beta)
    empty = wide_k.new_zeros(*k[:, 0].shape, v.shape[-1])
    state, outs = empty, []
    for at in range(q.shape[1]):
        state = empty if at in starts else state * decay[:, at, :, None, None]
        wrong = wide_v[:, at] - torch.einsum("bhk,bhkv->bhv", wide_k[:, at], state)
        state = state + torch.einsum("bhk,bhv,bh->bhkv", wide_k[:, at], wrong, beta[:, at])
        outs.append(torch.einsum("bhk,bhkv->bhv", wide_q[:, at], state))
    return (torch.stack(outs, dim=1) * (scale or q.shape[-1] ** -0.5)).to(q.dtype), None


MODULES: dict[str, dict[str, Any]] = {
    "mamba_ssm": {"__version__": "2.2.5"},
    "mamba_ssm.ops": {},
    "mamba_ssm.ops.triton": {},
    "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": GatedRMSNorm},
    "mamba_ssm.ops.triton.ssd_combined": {
        "mamba_chunk_scan_combined": mamba_chunk_scan_combined,
        "mamba_split_conv1d_scan_combined": mamba_split_conv1d_scan_combined,
    },
    "causal_conv1d": {"__version__": "1.5.0", "causal_conv1d_fn": causal_conv1d_fn},
    "fla": {},
    "fla.modules": {},
    "fla.modules.convolution": {"causal_conv1d": delta_conv1d},
    "fla.modules.l2norm": {"l2norm": l2norm},
    "fla.ops": {},
    "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": chunk_gated_delta_rule},
}
"""Module -> name -> replacement that Megatron imports.  With these values of ``__version__``, Megatron packs sequences
only in training."""
