"""What a training loop on megatron.core has to offer so that a step survives deaths: an interface with a version.

    Loop     the seams of one training loop, what recovery asks of it, and the version it was written for
    ROLES    what each seam is: when the loop calls it, with which arguments, what it returns
    Seam     a function of the loop, by module, name and parameters, checked before anything is wrapped

The loops that come with this package are Megatron-LM's (``megatron_hooks.loops.megatron_lm``) and Megatron-Bridge's
(``megatron_hooks.loops.bridge``); docs/integrate.md says how another one is written, and what is promised.
"""

from __future__ import annotations

from recover_megatron.integrate.loop import INTERFACE, ROLES, Loop, Role, Seam, Services, Wrapper, misfit, wrap

__all__ = ["INTERFACE", "ROLES", "Loop", "Role", "Seam", "Services", "Wrapper", "misfit", "wrap"]
