"""Bit-exact loading of a state into a model or optimizer, and detection of values that the load has changed."""

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
    """Error: ``load_state_dict`` did not restore the received state, or the holders cannot send their state."""


@contextmanager
def as_sent(part: object) -> Iterator[None]:
    """Make the optimizers of ``part`` keep the dtypes of a state that is loaded inside this context.

    ``torch.optim.Optimizer.load_state_dict`` casts tensors to the dtype of their parameter, so a 32-bit moment of a
    16-bit parameter would lose half of its bits.  Other load hooks of the optimizers still run: pre-hooks before
    this module's pre-hook, and post-hooks after this module's post-hook.
    """
    with ExitStack() as stack:
        for optimizer in _optimizers(part, {}).values():
            restorer = _Restorer()
            with suppress(AttributeError):  # accelerate's subclass of Optimizer does not support these hooks
                stack.enter_context(optimizer.register_load_state_dict_pre_hook(restorer.before))
                stack.enter_context(optimizer.register_load_state_dict_post_hook(restorer.after, prepend=True))
        yield


def _optimizers(part: object, found: dict[int, torch.optim.Optimizer]) -> dict[int, torch.optim.Optimizer]:
    """Return ``id`` -> optimizer for ``part``, if it is an optimizer, and for all optimizers in its attributes.

    An attribute may be an optimizer, or a list, tuple or dictionary of optimizers; an optimizer may wrap another one.
    """
    if isinstance(part, torch.optim.Optimizer):
        found[id(part)] = part
    for value in list(getattr(part, "__dict__", {}).values()):
        several = value if isinstance(value, (list, tuple)) else value.values() if isinstance(value, dict) else [value]
        for each in several:
            if isinstance(each, torch.optim.Optimizer) and id(each) not in found:
                _optimizers(each, found)
    return found


class _Restorer:
    """Load hooks of an optimizer: where the load has cast a tensor, they restore the tensor of the loaded state."""

    def before(self, optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> None:
        """Keep references to the state that will be loaded and to the present parameter groups."""
        self._given, self._groups = given, optimizer.param_groups

    def after(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace the optimizer's tensors by the tensors of the loaded state, where the shapes are equal."""
        numbers = chain.from_iterable(group["params"] for group in self._given["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        for number, parameter in zip(numbers, parameters, strict=True):
            if parameter in optimizer.state and number in self._given["state"]:
                loaded, sent = optimizer.state[parameter], self._given["state"][number]
                optimizer.state[parameter] = _merged(loaded, sent, parameter)
        for group, replaced in zip(optimizer.param_groups, self._groups, strict=True):
            for name, value in group.items():  # move a tensor, such as a learning rate, back to its old device
                if isinstance(value, torch.Tensor) and isinstance(old := replaced.get(name), torch.Tensor):
                    group[name] = value.to(old.device)


def _merged(loaded: Any, sent: Any, parameter: torch.Tensor) -> Any:
    """Return ``loaded`` with the bits and dtypes of ``sent``, on the device of ``loaded``."""
    if isinstance(loaded, torch.Tensor) and isinstance(sent, torch.Tensor) and loaded.shape == sent.shape:
        # A fused optimizer traverses parameter and moment in parallel, so both need the same strides.
        like = parameter if parameter.shape == sent.shape else sent
        if loaded.dtype == sent.dtype == parameter.dtype and loaded.stride() == like.stride():
            return loaded  # torch has not cast the tensor
        moved = sent.to(loaded.device)
        if moved.stride() == like.stride():
            return moved
        return torch.empty_like(like, dtype=sent.dtype, requires_grad=False).copy_(moved)
    if isinstance(loaded, dict) and isinstance(sent, dict):
        for key in loaded.keys() & sent.keys():
            loaded[key] = _merged(loaded[key], sent[key], parameter)
    elif type(loaded) in (list, tuple) and isinstance(sent, (list, tuple)) and len(loaded) == len(sent):
        return type(loaded)(_merged(a, b, parameter) for a, b in zip(loaded, sent, strict=True))
    return sent if isinstance(sent, str) else loaded  # torch's load turns a string into "<generator object ...>"


_SMALL = 64 << 10
"""Size in bytes below which zlib is faster than ``digest``."""
Contents = dict[Path, tuple[str, int]]
"""Path -> description of a value, in tree order: (text, 0), or (dtype and shape, digest) for a tensor."""


def contents(tree: Any, path: Path = ()) -> Contents:
    """Describe all values of ``tree``.  Bit-equal trees have equal descriptions; a tuple is described like a list."""
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
    """Return whether ``described`` describes a dictionary or list, whose items are described separately."""
    return described[0].startswith("a ")  # JSON text never starts like this


def difference(sent: Contents, loaded: Contents) -> str:
    """Return a text with the first differences between the states ``sent`` and ``loaded``; "" if they are equal.

    A different order of the tensors is a difference, since a worker that sends a state numbers tensors in this order.
    """
    nothing = ("nothing", 0)
    places = [place for place in {**sent, **loaded} if sent.get(place) != loaded.get(place)]
    lines = []
    for place in places[:4]:
        was, now = sent.get(place, nothing), loaded.get(place, nothing)
        became = f"{was[0]:.80} became {now[0]:.80}" if was[0] != now[0] else f"other bits of {was[0]:.80}"
        lines.append(f"{'.'.join(map(str, place))}: {became}")
    if more := len(places) - len(lines):
        lines.append(f"and {more} more")
    if not places and _tensors(sent) != _tensors(loaded):
        lines.append("its tensors have another order")
    return "; ".join(lines)


def _tensors(described: Contents) -> list[Path]:
    return [place for place, (text, _) in described.items() if text.startswith("torch.")]  # JSON text never starts so
