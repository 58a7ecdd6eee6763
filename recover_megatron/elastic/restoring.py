"""Loads a state into a part so that nothing of it is changed, and finds what a part has changed nevertheless."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from typing import Any

import torch

from recover_megatron.collectives.state.transport import bytes_of, digest
from recover_megatron.collectives.state.trees import Path


class NotRestored(Exception):
    """A part's ``load_state_dict`` has made another state of the one that it was given."""


@contextmanager
def as_sent(part: object) -> Iterator[None]:
    """While ``part`` loads a state, its optimizers take the tensors with the types that they have in that state.

    ``torch.optim.Optimizer.load_state_dict`` casts tensors to the type of their parameter: a moment of 32 bits beside a
    parameter of 16 bits loses half of its bits.  Hooks of the optimizer work as always: those that change the state
    before it is loaded come before this, and those that run afterwards come after this.
    """
    with ExitStack() as stack:
        for optimizer in _optimizers(part, {}).values():
            restorer = _Restorer()
            with suppress(AttributeError):  # a wrapper that is an Optimizer by its type alone: accelerate's
                stack.enter_context(optimizer.register_load_state_dict_pre_hook(restorer.before))
                stack.enter_context(optimizer.register_load_state_dict_post_hook(restorer.after, prepend=True))
        yield


def _optimizers(part: object, found: dict[int, torch.optim.Optimizer]) -> dict[int, torch.optim.Optimizer]:
    """All optimizers that ``part`` is or has in its attributes (a wrapper, a container), by their ``id``."""
    if isinstance(part, torch.optim.Optimizer):
        found[id(part)] = part
    for value in list(getattr(part, "__dict__", {}).values()):
        several = value if isinstance(value, (list, tuple)) else value.values() if isinstance(value, dict) else [value]
        for each in several:
            if isinstance(each, torch.optim.Optimizer) and id(each) not in found:
                _optimizers(each, found)
    return found


class _Restorer:
    """Puts the tensors of a state into an optimizer that has loaded it."""

    def before(self, optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> None:
        """Keep the state that is loaded, and the groups that it replaces."""
        self._given, self._groups = given, optimizer.param_groups

    def after(self, optimizer: torch.optim.Optimizer) -> None:
        """Take its tensors where the optimizer has tensors of the same shape."""
        numbers = chain.from_iterable(group["params"] for group in self._given["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        for number, parameter in zip(numbers, parameters, strict=True):
            if parameter in optimizer.state and number in self._given["state"]:
                loaded, sent = optimizer.state[parameter], self._given["state"][number]
                optimizer.state[parameter] = _merged(loaded, sent, parameter)
        for group, replaced in zip(optimizer.param_groups, self._groups, strict=True):
            for name, value in group.items():  # a learning rate that is a tensor stays on its device
                if isinstance(value, torch.Tensor) and isinstance(its := replaced.get(name), torch.Tensor):
                    group[name] = value.to(its.device)


def _merged(loaded: Any, sent: Any, parameter: torch.Tensor) -> Any:
    """Return ``loaded`` with the bits and types of ``sent``, on the device to which torch has moved it."""
    if isinstance(loaded, torch.Tensor) and isinstance(sent, torch.Tensor) and loaded.shape == sent.shape:
        # A fused optimizer goes through parameter and moment side by side: both need the same order in memory.
        like = parameter if parameter.shape == sent.shape else sent
        if loaded.dtype == sent.dtype == parameter.dtype and loaded.stride() == like.stride():
            return loaded  # torch has not cast it, and may have moved it to another device
        moved = sent.to(loaded.device)
        if moved.stride() == like.stride():
            return moved
        return torch.empty_like(like, dtype=sent.dtype, requires_grad=False).copy_(moved)
    if isinstance(loaded, dict) and isinstance(sent, dict):
        for key in loaded.keys() & sent.keys():
            loaded[key] = _merged(loaded[key], sent[key], parameter)
    elif type(loaded) in (list, tuple) and isinstance(sent, (list, tuple)) and len(loaded) == len(sent):
        return type(loaded)(_merged(mine, its, parameter) for mine, its in zip(loaded, sent, strict=True))
    return sent if isinstance(sent, str) else loaded  # torch makes "<generator object ...>" of a text


_SMALL = 64 << 10
"""Bytes below which a digest takes longer than zlib."""
Contents = dict[Path, tuple[str, int]]
"""Each value of a tree by its place, in the order of the tree: its text, or the type, shape and digest of a tensor."""


def contents(tree: Any, path: Path = ()) -> Contents:
    """Describe a tree so that two descriptions are equal where the trees are, bit for bit; a tuple counts as a list."""
    if isinstance(tree, torch.Tensor):
        small = tree.nbytes < _SMALL
        found = zlib.crc32(bytes_of(tree).cpu().numpy().data) if small else digest([tree])
        return {path: (f"{tree.dtype} {list(tree.shape)}", found)}
    items: list[tuple[Any, Any]]
    if isinstance(tree, dict):
        items = list(tree.items())
    elif isinstance(tree, (list, tuple)) and any(isinstance(item, (dict, list, tuple, torch.Tensor)) for item in tree):
        items = list(enumerate(tree))
    else:
        return {path: (json.dumps(tree, default=lambda value: f"a {type(value).__name__}"), 0)}
    described: Contents = {path: (f"a {'dictionary' if isinstance(tree, dict) else 'list'} of {len(tree)}", 0)}
    for key, item in items:
        described |= contents(item, (*path, key))
    return described


def is_container(described: tuple[str, int]) -> bool:
    """Whether a place of a tree is a dictionary or list, whose items are described by themselves."""
    return described[0].startswith("a ")  # JSON never does


def difference(sent: Contents, loaded: Contents) -> str:
    """Tell what differs, the first places of it; empty: nothing does.

    The order of the tensors counts, too: a worker that gives the state to others numbers them by it.
    """
    nothing = ("nothing", 0)
    places = [place for place in {**sent, **loaded} if sent.get(place) != loaded.get(place)]
    told = []
    for place in places[:4]:
        was, now = sent.get(place, nothing), loaded.get(place, nothing)
        became = f"{was[0]:.80} became {now[0]:.80}" if was[0] != now[0] else f"other bits of {was[0]:.80}"
        told.append(f"{'.'.join(map(str, place))}: {became}")
    if more := len(places) - len(told):
        told.append(f"and {more} more")
    if not places and _tensors(sent) != _tensors(loaded):
        told.append("its tensors come in another order")
    return "; ".join(told)


def _tensors(described: Contents) -> list[Path]:
    return [place for place, (text, _) in described.items() if text.startswith("torch.")]  # JSON never does
