"""A function or method of Megatron-Core that is wrapped, after a check that it is the one we know.

Those of a training loop are wrapped by their roles: ``recover_megatron.integrate``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from recover_megatron.integrate import seams
from recover_megatron.megatron_hooks.entry.versions import SUPPORTED

wrap = partial(seams.wrap, supported=SUPPORTED)
"""Replace ``owner.name`` by ``wrapper(owner.name)``; see `seams.wrap`."""


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Let ``owner.name`` be ``value`` for a while."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
