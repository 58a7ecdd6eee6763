"""Random numbers that do not depend on which worker draws them: the generators are set by the step and the microbatch.

    microbatch j of step s     set from (seed, s, j)     dropout is the same whichever worker runs the microbatch
    the update of step s       set from (seed, s)        the same on all workers: noise, stochastic rounding
    the loop after step s      goes on from there        the same on all workers: an order of samples
    after `lead`               set from (seed, s, n)     the worker that leads may have drawn more than the others

So a run in which workers die draws the numbers of the run without, whichever worker runs a microbatch, and a worker
that comes draws those of the others.  What is drawn before the first step is the script's own: it sets a seed there.

Set are Python's ``random``, NumPy's global generator where the process has imported NumPy, and torch's default
generators of the CPU and of the parameters' kind of device.
"""

from __future__ import annotations

import hashlib
import random
import sys

import torch


class Generators:
    """Sets the default generators of this process.  ``seed`` None: they are left alone."""

    def __init__(self, seed: int | None, device: torch.device) -> None:
        """``device``: that of the parameters."""
        self._seed = seed
        # Not torch.manual_seed: for each kind of device that is not in use it formats a call stack, about 1 ms.
        module = None if device.type == "cpu" else torch.get_device_module(device)
        self._set_device = getattr(module, "manual_seed_all", getattr(module, "manual_seed", None))

    def for_microbatch(self, step: int, j: int) -> None:
        """Set them for microbatch ``j`` of ``step``."""
        self._set(f"{step} {j}")

    def for_update(self, step: int) -> None:
        """Set them for the update of ``step``, and for the loop's body after it."""
        self._set(f"{step} update")

    def after_lead(self, step: int, number: int) -> None:
        """Set them after the ``number``-th call that one worker makes for all, since ``step`` was finished."""
        self._set(f"{step} lead {number}")

    def _set(self, of: str) -> None:
        """Set all generators from the seed and ``of``, a text of its own for each use.

        Equal texts give equal numbers on every worker with the same kind of device.
        """
        if self._seed is None:
            return
        mixed = hashlib.blake2b(f"{self._seed} {of}".encode(), digest_size=8).digest()
        number = int.from_bytes(mixed) >> 1  # 63 bits
        torch.default_generator.manual_seed(number)
        if self._set_device is not None:
            self._set_device(number)
        random.seed(number)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(number & 0xFFFFFFFF)
