"""One operation of a gloo backend, on copies in host memory of what lies on a device.

    to(backend) --the operation, copies in the places of tensors--> wait --bring_back()--> the tensors have the result
                                                                      '--revoked--> they are as they were

gloo has not all of its operations for the tensors of a GPU, and those that it has order their copies by the stream of
whichever thread waits.  What crosses replicas between two steps is small; what is large goes over the ring.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Staged:
    """See the module's text.  ``away``: which tensors are copied."""

    def __init__(self, away: Callable[[torch.Tensor], bool] = lambda tensor: tensor.device.type != "cpu") -> None:
        self._away = away
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._on: Any = None

    def to(self, backend: Any) -> Any:
        """The backend, as an operation is to see it."""
        self._on = backend
        return self

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._on, name)

        def call(*arguments: Any) -> Any:
            return method(*map(self._here, arguments))

        return call

    def bring_back(self) -> None:
        """The operation is over: what it wrote goes to where it belongs."""
        with torch.no_grad():
            for original, copy in self._copies:
                original.copy_(copy)

    def _here(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and self._away(value):
            # In one piece, which is what gloo takes, whatever the original is a part of.
            copy = torch.empty(value.shape, dtype=value.dtype).copy_(value.detach())
            self._copies.append((value, copy))
            return copy
        return [self._here(item) for item in value] if isinstance(value, (list, tuple)) else value
