"""--use-precision-aware-optimizer: moments and gradients in bfloat16, and complete main parameters kept by Megatron.

Transformer Engine's optimizer would keep the main parameters in its own state.  For a bfloat16 model it would keep only
the remainders, which are the bits that the model's parameters lack:

    main, float32         | sign, exponent, 7 bits | 16 bits |
    model, bfloat16       | the same, plus 1 in the last bit |   ``nearest``
                          | if the 16 bits are >= a half     |
    remainder, int16                               | 16 bits |   ``remainder``

Here Megatron keeps the main parameters in float32 (``install``), as it does itself with most FP8 recipes.  So they are
sliced, copied and sent as with any other optimizer, and the update computes the same numbers, also in the model.

Checkpoints by bucket equal stock Megatron's: moments in float32, main parameters as remainders.  A checkpoint does not
record whether it contains main parameters or remainders.  But a model parameter is a rounded main parameter, so a
loaded value that does not match the model parameter is a remainder (``whole``).  In this way a run without this
optimizer reads remainders, too.

Moments in float16 or FP8 are refused (`refused`), because they have one scale for a complete shard of a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from recover_megatron.errors import UserError
from recover_megatron.megatron_hooks import monkeypatch

_BY_ITSELF = "use_precision_aware_optimizer_no_fp8_or_ds_fp8"
"""Field of Megatron's configuration; if True, the optimizer's state has the main parameters, and gradients keep their
dtype."""


def install() -> None:
    """Wrap the seam, before the optimizer is configured; raises UserError if its signature is unknown.

    Each configuration gets the field ``recover_remainders``: True if stock Megatron would keep remainders.
    """

    def kept_by_megatron(original: Callable[[Any], None]) -> Callable[[Any], None]:
        def __post_init__(self: Any) -> None:
            original(self)
            self.recover_remainders = bool(
                getattr(self, _BY_ITSELF, False) and self.bf16 and self.store_param_remainders
            )
            setattr(self, _BY_ITSELF, False)

        return __post_init__

    monkeypatch.wrap("OptimizerConfig.__post_init__", kept_by_megatron)


def check(config: Any) -> None:
    """Raise UserError for an optimizer's configuration that was created before ``install``."""
    if getattr(config, _BY_ITSELF, False):
        raise UserError(
            "--recover: the optimizer configuration was created before --recover was installed, so Transformer Engine "
            "would keep the main parameters: create it later, or remove --use-precision-aware-optimizer"
        )


def has_remainders(optimizer: Any, dtype: torch.dtype) -> bool:
    """Return whether stock Megatron would keep remainders of this optimizer's parameters of type ``dtype``."""
    config = getattr(optimizer, "config", None)
    return dtype == torch.bfloat16 and getattr(config, "recover_remainders", False)


def nearest(main: torch.Tensor) -> torch.Tensor:
    """Round main parameters to bfloat16: halves away from zero, as if remainders were kept, not to even."""
    return (main.view(torch.int32) + 0x8000 >> 16).to(torch.int16).view(torch.bfloat16)


def remainder(main: torch.Tensor) -> torch.Tensor:
    """Return the low 16 bits of main parameters, as int16."""
    return main.view(torch.int32).to(torch.int16)


def whole(model: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
    """Return the float32 main parameters of ``model`` (bfloat16) from ``read``, the numbers in a checkpoint.

    ``read`` has main parameters, or remainders, which are all integers.  Compares bits, so NaN and -0.0 match, too.
    """
    bits, low = model.view(torch.int16), read.to(torch.int16)
    fits = (nearest(read).view(torch.int16) == bits) | (read.to(torch.bfloat16).view(torch.int16) == bits)
    if bool(fits.all()) or not torch.equal(low.float(), read):
        return read
    high = bits.int() - (low < 0).int()  # a negative remainder: the model's parameter was rounded up
    return (high << 16 | low.int() & 0xFFFF).view(torch.float32)


def set_scales(inner: Any, states: Iterable[tuple[torch.Tensor, dict[str, Any]]]) -> None:
    """Give Transformer Engine's optimizer a scale for each bfloat16 moment, as if it had created these states.

    That optimizer reads a scale for every moment that is not float32, but does not use the scale of a bfloat16 moment.
    ``states``: (tensor, state) of all tensors that the optimizer may update.  Other optimizers are not changed.
    """
    if hasattr(inner, "_scales"):
        inner._scales.clear()
        for tensor, state in states:
            inner._scales[tensor] = {
                name: torch.ones(1, device=tensor.device)
                for name, value in state.items()
                if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16
            }
