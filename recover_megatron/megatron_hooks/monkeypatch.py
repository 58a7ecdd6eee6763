"""A seam: one function or method of Megatron that is wrapped, after a check that it is the one we know."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from recover_megatron.errors import UserError
from recover_megatron.megatron_hooks.entry.versions import SUPPORTED


def wrap(
    owner: Any, name: str, parameters: Sequence[str], wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[..., Any]:
    """Replace ``owner.name`` by ``wrapper(owner.name)`` and return the original.

    ``parameters`` are the names that the original's parameters must begin with, in order; later versions may have more.
    Raises UserError, naming the seam and the supported versions, if it is missing or begins otherwise: a hook on a
    function that changed its meaning would break the invariant silently.
    """
    where = f"{getattr(owner, '__name__', owner)}.{name}"
    original = getattr(owner, name, None)
    if not callable(original):
        raise UserError(f"--recover: this Megatron has no {where} ({SUPPORTED})")
    found = tuple(inspect.signature(original).parameters)
    if found[: len(parameters)] != tuple(parameters):
        raise UserError(
            f"--recover: {where} of this Megatron takes ({', '.join(found)}), expected ({', '.join(parameters)}, ...): "
            f"{SUPPORTED}"
        )
    setattr(owner, name, functools.wraps(original)(wrapper(original)))
    return original


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Let ``owner.name`` be ``value`` for a while."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
