"""--use-precision-aware-optimizer: moments and gradients in bfloat16, and main parameters that Megatron keeps whole.

Transformer Engine's optimizer would have the main parameters in its own state, and those of a model in bfloat16 as what
the model's lack alone, the remainders:

    main, float32         | sign, exponent, 7 bits | 16 bits |
    model, bfloat16       | the same, one more where the     |   ``nearest``
                          | 16 bits are a half or more       |
    remainder, int16                               | 16 bits |   ``remainder``

Here Megatron has them in float32, as it has them itself with most FP8 recipes (``install``).  So they are cut, copied
and given to others like those of any optimizer, and the update makes the same numbers, those of the model too.

Checkpoints by bucket are stock Megatron's: moments in float32, main parameters as remainders.  A checkpoint does not
say which it has; but a model's parameter is its main one rounded, so what does not fit it is a remainder (``whole``).
So who trains without this optimizer reads remainders, too.

Moments in float16 or FP8 are refused (`refused`): their scales are those of a whole piece of a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from recover_megatron.errors import UserError
from recover_megatron.megatron_hooks import monkeypatch

_BY_ITSELF = "use_precision_aware_optimizer_no_fp8_or_ds_fp8"
"""Of Megatron's configuration: whether main parameters are the optimizer's own, and gradients in their own type."""


def install() -> None:
    """Wrap the seam; raises UserError if this Megatron's is not the one we know.  Before the optimizer is configured.

    Each configuration has ``recover_remainders``: whether stock Megatron would keep remainders.
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
    """Raise UserError for an optimizer's configuration that was made before ``install``."""
    if getattr(config, _BY_ITSELF, False):
        raise UserError(
            "--recover: the optimizer's configuration was made before --recover began, so Transformer Engine would "
            "keep the main parameters (--use-precision-aware-optimizer): make it in the training, or leave that out"
        )


def has_remainders(optimizer: Any, dtype: torch.dtype) -> bool:
    """Whether stock Megatron would keep remainders of this optimizer's parameters of type ``dtype``."""
    config = getattr(optimizer, "config", None)
    return dtype == torch.bfloat16 and getattr(config, "recover_remainders", False)


def nearest(main: torch.Tensor) -> torch.Tensor:
    """Main parameters in bfloat16; a half is rounded away from zero, and not to even, as where a remainder is kept."""
    return (main.view(torch.int32) + 0x8000 >> 16).to(torch.int16).view(torch.bfloat16)


def remainder(main: torch.Tensor) -> torch.Tensor:
    """The last 16 bits of main parameters, as int16."""
    return main.view(torch.int32).to(torch.int16)


def whole(model: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
    """The main parameters, float32, of a model's parameters (bfloat16) with what a checkpoint has of them, as numbers.

    That is themselves, or their remainders: all integers.  Bits are compared, so that NaN and -0.0 fit, too.
    """
    bits, low = model.view(torch.int16), read.to(torch.int16)
    fits = (nearest(read).view(torch.int16) == bits) | (read.to(torch.bfloat16).view(torch.int16) == bits)
    if bool(fits.all()) or not torch.equal(low.float(), read):
        return read
    high = bits.int() - (low < 0).int()  # else it was rounded up
    return (high << 16 | low.int() & 0xFFFF).view(torch.float32)


def set_scales(inner: Any, states: Iterable[tuple[torch.Tensor, dict[str, Any]]]) -> None:
    """Have Transformer Engine's optimizer find a scale for each moment in bfloat16, as if it had made these states.

    It asks for one where a moment is not in float32, and never uses one of bfloat16.  ``states``: of all that it may be
    asked to update.  Another optimizer is left alone.
    """
    if hasattr(inner, "_scales"):
        inner._scales.clear()
        for tensor, state in states:
            inner._scales[tensor] = {
                name: torch.ones(1, device=tensor.device)
                for name, its in state.items()
                if isinstance(its, torch.Tensor) and its.dtype == torch.bfloat16
            }
