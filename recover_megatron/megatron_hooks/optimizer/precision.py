"""--use-precision-aware-optimizer: moments and gradients in bfloat16, while Megatron keeps complete main parameters.

Stock Megatron leaves the main parameters to Transformer Engine's optimizer.  For a bfloat16 model that optimizer keeps
only the remainders, which are the bits that the model's parameters lack:

    main, float32         | sign, exponent, 7 bits | 16 bits |
    model, bfloat16       | the same, plus 1 in the last bit |   ``nearest``
                          | if the 16 bits are >= a half     |
    remainder, int16                               | 16 bits |   ``remainder``

With --recover, Megatron keeps the main parameters in float32 (``install``), as stock Megatron does with most FP8
recipes.  So main parameters are sliced, copied and sent as with any other optimizer, and updates have the same results
as in stock Megatron.

Checkpoints by bucket equal stock Megatron's: moments in float32, main parameters as remainders.  A checkpoint does not
record whether it contains main parameters or remainders.  But a model parameter is a rounded main parameter, so a
loaded value that does not match the model parameter is a remainder (``whole``).  Because of this test, a run without
this optimizer can load remainders, too.

Moments in float16 or FP8 are refused (`refused`), because they have one scale for a complete shard of a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from recover_megatron.errors import UserError
from recover_megatron.megatron_hooks import monkeypatch

_BY_ITSELF = "use_precision_aware_optimizer_no_fp8_or_ds_fp8"
"""Field of Megatron's optimizer configuration.  If True, Transformer Engine's optimizer keeps the main parameters in
its state, and gradients keep their dtype."""


def install() -> None:
    """Wrap the constructor of the optimizer's configuration; raises UserError if its signature is unknown.

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
    """Raise UserError if an optimizer's configuration was created before ``install``."""
    if getattr(config, _BY_ITSELF, False):
        raise UserError(
            "--recover: the optimizer configuration was created before --recover was installed, so Transformer Engine "
            "would keep the main parameters; create the configuration later, or remove --use-precision-aware-optimizer"
        )


def has_remainders(optimizer: Any, dtype: torch.dtype) -> bool:
    """Return whether stock Megatron would keep remainders of this optimizer's parameters of type ``dtype``."""
    config = getattr(optimizer, "config", None)
    return dtype == torch.bfloat16 and getattr(config, "recover_remainders", False)


def nearest(main: torch.Tensor) -> torch.Tensor:
    """Round main parameters to bfloat16, halves away from zero, as Transformer Engine does if it keeps remainders."""
    return (main.view(torch.int32) + 0x8000 >> 16).to(torch.int16).view(torch.bfloat16)


def remainder(main: torch.Tensor) -> torch.Tensor:
    """Return the low 16 bits of main parameters, as int16."""
    return main.view(torch.int32).to(torch.int16)


def whole(model: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
    """Return the float32 main parameters of ``model`` (bfloat16) from ``read``, the numbers in a checkpoint.

    ``read`` contains either main parameters or remainders, which are integers.  The test whether ``read`` matches
    ``model`` compares bits, so that NaN and -0.0 match, too.
    """
    bits, low = model.view(torch.int16), read.to(torch.int16)
    fits = (nearest(read).view(torch.int16) == bits) | (read.to(torch.bfloat16).view(torch.int16) == bits)
    if bool(fits.all()) or not torch.equal(low.float(), read):
        return read
    high = bits.int() - (low < 0).int()  # a negative remainder means that the model's parameter was rounded up
    return (high << 16 | low.int() & 0xFFFF).view(torch.float32)


def set_scales(inner: Any, states: Iterable[tuple[torch.Tensor, dict[str, Any]]]) -> None:
    """Set a scale of 1 for each bfloat16 moment of Transformer Engine's optimizer ``inner``.

    That optimizer looks up a scale for each moment that is not float32, although it ignores the scale of a bfloat16
    moment.  ``states``: (tensor, state) of all tensors that ``inner`` may update.  An ``inner`` of another type is not
    changed.
    """
    if hasattr(inner, "_scales"):
        inner._scales.clear()
        for tensor, state in states:
            inner._scales[tensor] = {
                name: torch.ones(1, device=tensor.device)
                for name, value in state.items()
                if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16
            }
