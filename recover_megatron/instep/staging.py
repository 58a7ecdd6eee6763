"""One operation of a gloo backend, on copies of what it would write, and in host memory.

    to(backend) --the operation, copies in the places of tensors--> wait --bring_back()--> the tensors have the result
                                                                      '--revoked--> they are as they were

An operation in place writes over its input, and one that is interrupted has written over a part of it; it may have to
be carried out once more, so it is given a copy. And gloo has not all of its operations for the tensors of a GPU, and
those that it has order their copies by the stream of whichever thread waits. What crosses replicas between two steps
is small; what is large goes over the ring.

``Kept`` has what a section wrote over: it may be run again as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

IN_PLACE = ("allreduce", "reduce", "broadcast")
"""Operations that read what they write.  All others write their first argument and read their second."""


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Staged:
    """The tensors of one operation, and what it is carried out on in their place.

    ``away``: which tensors are copied in any case.

    ``every_result``: also results that are no input are written when they are brought back, and not before: where the
    operation may be repeated by fewer workers, nothing must be left of the others.
    """

    def __init__(
        self,
        away: Callable[[torch.Tensor], bool] = lambda tensor: tensor.device.type != "cpu",
        *,
        every_result: bool = False,
    ) -> None:
        self._away = away
        self._every_result = every_result
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._on: Any = None
        self.spoiled: list[torch.Tensor] = []
        """The inputs over which ``bring_back`` writes."""

    def to(self, backend: Any) -> Any:
        """The backend, as an operation is to see it.  Forgets what the last one wrote, if there was one."""
        self._on, self._copies, self.spoiled = backend, [], []
        return self

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._on, name)

        def call(written: Any, *arguments: Any) -> Any:
            read = {_storage(tensor) for tensor in _tensors(written if name in IN_PLACE else arguments[:1])}
            return method(
                self._copied(written, lambda tensor: _storage(tensor) in read, True),
                *(self._copied(value, lambda tensor: False, False) for value in arguments),
            )

        return call

    def bring_back(self) -> None:
        """The operation is over: what it wrote goes to where it belongs."""
        with torch.no_grad():
            for original, copy in self._copies:
                original.copy_(copy)

    def _copied(self, value: Any, shared: Callable[[torch.Tensor], bool], written: bool) -> Any:
        """``value`` with copies of its tensors that are away or, of those ``written``, that are read, too (shared)."""
        if isinstance(value, (list, tuple)):
            return [self._copied(item, shared, written) for item in value]
        if not isinstance(value, torch.Tensor):
            return value
        if not (self._away(value) or shared(value) or (written and self._every_result)):
            return value
        # In one piece, which is what gloo takes, whatever the original is a part of.
        copy = torch.empty(value.shape, dtype=value.dtype).copy_(value.detach())
        if written:
            self._copies.append((value, copy))
            if shared(value):
                self.spoiled.append(value)
        return copy


class Kept:
    """The inputs over which operations of the present section have written."""

    def __init__(self) -> None:
        self._inputs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forget(self) -> None:
        """The section is over, or another one begins."""
        self._inputs.clear()

    def keep(self, tensors: list[torch.Tensor]) -> None:
        """An operation is about to write over these."""
        self._inputs += [(tensor, tensor.detach().clone()) for tensor in tensors]

    def restore(self) -> None:
        """The section begins again: its tensors have what they had when it began."""
        with torch.no_grad():
            for tensor, copy in reversed(self._inputs):
                tensor.copy_(copy)
        self.forget()
