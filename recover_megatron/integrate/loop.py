"""A training loop, as the recovery knows it: where its functions are, and what it is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from recover_megatron.errors import UserError
from recover_megatron.integrate.roles import ROLES
from recover_megatron.integrate.seams import Seam, Wrapper

INTERFACE = 1
"""The version of ``ROLES``, ``Services`` and what they promise.  It rises when a loop that fits would not fit any more;
a role or service that a loop may leave out does not raise it."""


class Services(Protocol):
    """What the recovery asks of a loop, besides wrapping it.  By the main thread of a worker.

    It reads the settings of the run by the names of Megatron's flags, from ``megatron.training.get_args()``.  A loop
    that has no such namespace sets a view of its own settings there, as ``megatron_hooks.loops.bridge`` does.
    """

    def operations(self, samples: int) -> float:
        """Floating-point operations of ``samples`` samples of the run's length: forward and backward."""

    def finish_saves(self) -> None:
        """Complete the checkpoints under way, and wait for it; with workers of all replicas, which call it, too."""

    def forget(self) -> None:
        """Drop the loop's global state: the model is to be built again, for another position."""


@dataclass(frozen=True)
class Loop:
    """One training loop.  ``seams``: for each role the functions that fill it."""

    name: str
    supported: str
    """Which versions are, in words, for messages."""
    seams: Mapping[str, Sequence[Seam]]
    services: Services
    interface: int = INTERFACE
    """The version of the interface that it was written for."""

    def misfits(self) -> list[str]:
        """Everything that does not fit, in words; empty: all seams are those that we know."""
        if self.interface != INTERFACE:
            return [f"it was written for version {self.interface} of recover_megatron.integrate, this is {INTERFACE}"]
        known = {role.name for role in ROLES}
        found = [f"there is no role {name}" for name in self.seams if name not in known]
        found += [
            f"it has nothing for {role.name}" for role in ROLES if role.required and not self.seams.get(role.name)
        ]
        return found + [reason for seams in self.seams.values() for seam in seams if (reason := seam.misfit())]

    def check(self) -> None:
        """Raises UserError with everything that does not fit, before anything is wrapped."""
        if reasons := self.misfits():
            raise UserError(*(f"--recover: {self.name}: {reason} ({self.supported})" for reason in reasons))

    def wrap(self, role: str, wrapper: Wrapper) -> None:
        """Wrap the functions that fill ``role``; none where this loop has none."""
        for seam in self.seams.get(role, ()):
            seam.wrap(wrapper, self.supported)
