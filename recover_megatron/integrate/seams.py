"""A seam: one function or method that is wrapped, after a check that it is the one we know, by name and parameters."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from recover_megatron.errors import UserError

Function = Callable[..., Any]
Wrapper = Callable[[Function], Function]
"""From a function to what is called in its place."""


def misfit(owner: Any, name: str, parameters: Sequence[str], *, named: Sequence[str] = ()) -> str | None:
    """Why ``owner.name`` is not the function that we know, in words; None where it is.

    ``parameters``: the names that its parameters must begin with, in order; ``named``: what it must take besides,
    wherever.  A later version may have more.
    """
    where = f"{getattr(owner, '__name__', owner)}.{name}"
    original = getattr(owner, name, None)
    if not callable(original):
        return f"there is no {where}"
    found = tuple(inspect.signature(original).parameters)
    if found[: len(parameters)] != tuple(parameters):
        return f"{where} takes ({', '.join(found)}), expected ({', '.join(parameters)}, ...)"
    if missing := [one for one in named if one not in found]:
        return f"{where} takes ({', '.join(found)}), without {', '.join(missing)}"
    return None


def wrap(owner: Any, name: str, parameters: Sequence[str], wrapper: Wrapper, supported: str) -> Function:
    """Replace ``owner.name`` by ``wrapper(owner.name)`` and return the original.

    Raises UserError, with ``supported`` (which versions are), where it is another function than we know: a hook on a
    function that changed its meaning would break the invariant silently.
    """
    if reason := misfit(owner, name, parameters):
        raise UserError(f"--recover: {reason} ({supported})")
    original: Function = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(wrapper(original)))
    return original


@dataclass(frozen=True)
class Seam:
    """One function of a loop, by which it fills a role."""

    module: str
    """Where the loop looks it up: the module of the caller where it was imported by name."""
    name: str
    parameters: tuple[str, ...] = ()
    """What its parameters begin with."""
    named: tuple[str, ...] = ()
    """What it must take besides, wherever."""
    adapt: Callable[[Wrapper], Wrapper] | None = None
    """Where it takes its arguments otherwise than the role: makes a wrapper of this function from one of the role."""
    optional: bool = False
    """Whether a version may lack it: then nothing is wrapped."""

    def owner(self) -> Any:
        """The module, imported; None where there is none."""
        try:
            return importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{self.module}.".startswith(f"{error.name}."):
                raise  # it is there, and lacks something itself
            return None

    @property
    def present(self) -> bool:
        """Whether there is such a name."""
        return getattr(self.owner(), self.name, None) is not None

    def misfit(self) -> str | None:
        """Why it does not fit, in words; None where it does."""
        if (owner := self.owner()) is None:
            return None if self.optional else f"there is no module {self.module}"
        if self.optional and not self.present:
            return None
        return misfit(owner, self.name, self.parameters, named=self.named)

    def wrap(self, wrapper: Wrapper, supported: str) -> None:
        """Have ``wrapper``, one of the role, called in its place.  Raises UserError as ``wrap`` does."""
        if self.optional and not self.present:
            return
        own = wrapper if self.adapt is None else self.adapt(wrapper)
        wrap(self.owner(), self.name, self.parameters, own, supported)
