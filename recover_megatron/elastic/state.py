"""What the workers of a run hold: its state, which newcomers take from others, and the gradients of the step.

The state is a tree: ``state_dict()`` of the model, of the optimizer, and of whatever else was named.

    holder     put(epoch) ----- the tree stands until ``withdraw``, before the optimizer's step changes it
    newcomer   fetch(epoch, holders) ----- parameters arrive in their own memory, the rest in new memory, then is loaded
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from recover_megatron.collectives.ledger import is_distributed
from recover_megatron.collectives.state.holder import KIND, Offer, Offers
from recover_megatron.collectives.state.receiver import Receiver, Source
from recover_megatron.collectives.state.transport import digest
from recover_megatron.collectives.state.trees import Path, flatten, new_memory
from recover_megatron.elastic.restoring import NotRestored, as_sent, contents, difference, is_container
from recover_megatron.errors import UserError
from recover_megatron.logger import get_logger
from recover_megatron.network.connection import Challenge
from recover_megatron.network.peer_store import PeerStoreServer, open_stream

log = get_logger(__name__)


class Stateful(Protocol):
    """Anything with torch's two methods of state: a module, an optimizer, a scheduler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class Optimizers:
    """Several optimizers as one: all step, in their order, at each step of the training; their state is by number."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = list(optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of all."""
        return [group for optimizer in self.optimizers for group in getattr(optimizer, "param_groups", ())]

    def step(self) -> None:
        """Each steps with the gradients of its own parameters."""
        for optimizer in self.optimizers:
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """``{"0": the first one's, "1": ...}``."""
        return {str(number): optimizer.state_dict() for number, optimizer in enumerate(self.optimizers)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raises ValueError where it is the state of one optimizer, or of another number of them."""
        if (wanted := set(map(str, range(len(self.optimizers))))) != set(state_dict):
            raise ValueError(f"the optimizers' state has {sorted(state_dict)}, this worker has {sorted(wanted)}")
        for number, optimizer in enumerate(self.optimizers):
            optimizer.load_state_dict(state_dict[str(number)])


class State:
    """The parts whose state a run has, by name; "model", a module, is among them."""

    def __init__(self, parts: Mapping[str, Stateful]) -> None:
        self._parts = dict(parts)
        model: Any = parts["model"]
        saved = model.state_dict()
        frozen = {name: its for name, its in model.named_parameters() if not its.requires_grad}
        names = [name.rpartition(".") for name in {**dict(model.named_buffers()), **frozen} if name in saved]
        self._untrained = [(path + dot + its, model.get_submodule(path), its) for path, dot, its in names]

    def tree(self) -> dict[str, Any]:
        """The state as it is now: tensors are those in use, not copies."""
        return {name: part.state_dict() for name, part in self._parts.items()}

    def load(self, tree: Mapping[str, Any], *, copied: bool = False) -> None:
        """Take up a tree.  Raises ValueError where it is that of other parts, and what the parts raise.

        ``copied``: the tree stays as it is; without that, optimizers go on with its tensors.
        """
        if set(tree) != set(self._parts):
            raise ValueError(f"the state has the parts {sorted(tree)}, this worker has {sorted(self._parts)}")
        # From a checkpoint in other types the optimizer's state is cast, as the parameters are.
        same_types = _types(tree["model"]) == _types(self._parts["model"].state_dict())
        for name, part in self._parts.items():
            with as_sent(part) if same_types else contextlib.nullcontext():
                part.load_state_dict(copy.deepcopy(tree[name]) if copied else tree[name])

    def check(self) -> None:
        """Raise UserError where something of the state cannot be sent to other workers, with all reasons."""
        found = self.tree().items()
        reasons = [f"state of {name!r}: {why}" for name, its in found if (why := _cannot_be_sent(its))]
        if reasons:
            raise UserError(*reasons)

    def digest(self) -> str:
        """Equal where two states are, bit for bit.  Raises UserError as ``check`` does."""
        self.check()
        text, tensors = flatten(self.tree())
        known = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        return f"{digest([known, *tensors]):x}"

    def described(self) -> dict[str, str]:
        """Name -> type and digest of each value of the state, as text; equal where two states are, bit for bit.

        The order in which a part's dictionaries have their keys does not count: it may be that of a load.
        """
        found = {".".join(map(str, path)): its for path, its in contents(self.tree()).items() if not is_container(its)}
        return {name: f"{text} {number}" for name, (text, number) in sorted(found.items())}

    def untrained(self) -> dict[str, tuple[torch.Tensor | None, int]]:
        """What of the model's state is not trained, for ``changed``: the tensors, and how often each was changed."""
        tensors = ((name, getattr(module, its, None)) for name, module, its in self._untrained)
        # A tensor of torch's inference mode has no such number, and only that mode changes it.
        return {name: (its, 0 if its is None or its.is_inference() else its._version) for name, its in tensors}

    def changed(self, since: Mapping[str, tuple[torch.Tensor | None, int]]) -> list[str]:
        """The names of those that have been changed in place, or replaced.

        Torch does not count the changes of the running statistics of a BatchNorm, but those of
        ``num_batches_tracked``, which is changed with them.
        """
        now = self.untrained()
        return [name for name, (its, count) in since.items() if now[name][0] is not its or now[name][1] != count]

    def place(self) -> Callable[[Path, Sequence[int], torch.dtype], torch.Tensor]:
        """Where the tensors of a tree that arrives are to be: the model's in its own memory.

        So half of a state may be in the model when it ends in the middle: it must be fetched again.
        """
        model = {name: value for name, value in self._parts["model"].state_dict().items() if torch.is_tensor(value)}

        def place(path: Path, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
            mine = model.get(str(path[-1])) if len(path) == 3 and path[:2] == ("state", "model") else None
            fits = mine is not None and mine.is_contiguous() and list(mine.shape) == list(shape) and mine.dtype == dtype
            return mine.detach() if mine is not None and fits else new_memory(path, shape, dtype)

        return place


def _types(saved: Mapping[str, Any]) -> dict[str, torch.dtype]:
    return {name: value.dtype for name, value in saved.items() if torch.is_tensor(value)}


def _cannot_be_sent(tree: Any) -> str:
    try:
        _, tensors = flatten(tree)
    except TypeError as error:
        return str(error)
    return "a DTensor cannot be sent as part of a state" if any(map(is_distributed, tensors)) else ""


class Exchange:
    """Gives this worker's state to others, and gets theirs.  ``host``: the address by which they reach this worker."""

    def __init__(self, host: str, secret: bytes) -> None:
        self.store = PeerStoreServer(host, secret)
        self._offers = Offers(self.store.streams)
        self._challenge = Challenge(secret)
        self._offer: Offer | None = None

    @property
    def address(self) -> str:
        """Where others fetch what is offered."""
        return self.store.address

    def put(self, epoch: int, completed: int, trained: Sequence[bool], state: State) -> None:
        """Let the others of ``epoch`` have the state, which has ``completed`` steps, until ``withdraw``.

        ``trained``: which of the model's parameters are.  Where a later step has put something into the state that
        cannot be sent, the others are told why: this worker trains on.
        """
        tree = {"completed": completed, "trained": list(trained), "state": state.tree()}
        if why := _cannot_be_sent(tree["state"]):
            log.warning(f"workers that come cannot have the state after step {completed}, and end: {why}")
            tree = {"why": why}
        self._offer = self._offers.put(str(epoch), Offer(tree, shared=len(flatten(tree)[1])))

    def withdraw(self) -> None:
        """It is about to change.  Idempotent."""
        if self._offer is not None:
            self._offer.withdraw()
            self._offer = None

    def fetch(
        self,
        epoch: int,
        holders: Mapping[int, str],
        state: State,
        stay: Callable[[], None],
        progress: Callable[[], None],
    ) -> tuple[int, list[bool]]:
        """Take the state from ``holders`` (worker -> address); the steps that it has, and which parameters are trained.

        ``stay``: called meanwhile; raises to end it.  Raises that, ``PeerLost`` where no holder can give it,
        ``Disagreement``, and ``NotRestored`` where the state cannot be sent, or what was loaded is not what was sent.
        """
        name = f"{KIND}/{epoch}"

        def source(worker: int, address: str) -> Source:
            return Source(worker, lambda: open_stream(address, self._challenge, name, stay))

        sources = [source(worker, address) for worker, address in sorted(holders.items())]
        receiver = Receiver(sources, state.place(), stay=stay, awaited=stay, progress=progress)
        tree, _ = receiver.fetch(lambda tree: len(flatten(tree)[1]))
        if why := tree.get("why"):
            raise NotRestored(f"the other workers cannot give their state: {why}")
        sent = contents(tree["state"])
        with torch.no_grad():
            state.load(tree["state"])
        if differs := difference(sent, contents(state.tree())):
            raise NotRestored(
                "load_state_dict() has made another state of the one that the other workers have (it must restore all "
                f"that state_dict() returns): {differs}"
            )
        return int(tree["completed"]), list(tree["trained"])
