"""Seeds of the random number generators, computed from step and microbatch, so that all workers draw equal numbers.

    microbatch j of step s     seeded by (seed, s, j)    dropout does not depend on the worker that runs the microbatch
    the update of step s       seeded by (seed, s)       the same on all workers: noise, stochastic rounding
    the loop after step s      not seeded again          the same on all workers: an order of samples
    after the n-th `lead`      seeded by (seed, s, n)    the leading worker may have drawn more than the others

So a run in which workers die draws the same numbers as a run without failures, and a new worker draws the same numbers
as the others.  For numbers that the script draws before the first step, the script must set a seed.

The seeded generators are Python's ``random``, NumPy's global generator if the process has imported NumPy, and torch's
default generators of the CPU and of the parameters' device type.
"""

from __future__ import annotations

import hashlib
import random
import sys

import torch


class Generators:
    """Seeds the default generators of this process; if ``seed`` is None, it does not change them."""

    def __init__(self, seed: int | None, device: torch.device) -> None:
        """``device``: device of the parameters."""
        self._seed = seed
        # torch.manual_seed would take 1 ms longer, since it formats a call stack for each unused device type.
        module = None if device.type == "cpu" else torch.get_device_module(device)
        self._set_device = getattr(module, "manual_seed_all", getattr(module, "manual_seed", None))

    def for_microbatch(self, step: int, j: int) -> None:
        """Seed the generators for microbatch ``j`` of ``step``."""
        self._set(f"{step} {j}")

    def for_update(self, step: int) -> None:
        """Seed the generators for the update of ``step``, and for the loop's body after it."""
        self._set(f"{step} update")

    def after_lead(self, step: int, number: int) -> None:
        """Seed the generators after the ``number``-th call of ``lead`` since ``step`` was finished."""
        self._set(f"{step} lead {number}")

    def _set(self, of: str) -> None:
        """Seed all generators from the run's seed and ``of``, a text that is different for each use.

        Workers with the same device type draw equal numbers after an equal ``of``.
        """
        if self._seed is None:
            return
        mixed = hashlib.blake2b(f"{self._seed} {of}".encode(), digest_size=8).digest()
        number = int.from_bytes(mixed) >> 1  # keep 63 bits
        torch.default_generator.manual_seed(number)
        if self._set_device is not None:
            self._set_device(number)
        random.seed(number)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(number & 0xFFFFFFFF)
