"""A function or method of Megatron-Core that is wrapped, after a check that it is the one we know.

Those of a training loop are wrapped by their roles: ``recover_megatron.integrate``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from recover_megatron.integrate import seams
from recover_megatron.megatron_hooks.entry.versions import SUPPORTED


def wrap(
    owner: Any, name: str, parameters: Sequence[str], wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[..., Any]:
    """Replace ``owner.name`` by ``wrapper(owner.name)`` and return the original.

    ``parameters`` are the names that the original's parameters must begin with, in order; later versions may have more.
    Raises UserError, naming the seam and the supported versions, if it is missing or begins otherwise.
    """
    return seams.wrap(owner, name, parameters, wrapper, SUPPORTED)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Let ``owner.name`` be ``value`` for a while."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
