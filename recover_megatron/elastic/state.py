"""The state of a run as a tree: given to workers that come, taken from workers that have it.

    holder     put(epoch) ----- the tree stands until ``withdraw``, before the optimizer's step changes it
    newcomer   fetch(epoch, holders) ----- parameters arrive in their own memory, the rest in new memory, then is loaded

What is in it: ``state_dict()`` of the model, of the optimizer, and of whatever else was named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from recover_megatron.collectives.digest import digest
from recover_megatron.instep.state_holder import KIND, Offer, Offers
from recover_megatron.instep.state_receiver import Receiver, Source
from recover_megatron.instep.transfer import Path, flatten, new_memory
from recover_megatron.network.peer_store import PURPOSE, PeerStoreServer
from recover_megatron.network.proof import Challenge
from recover_megatron.network.streams import open_stream


class Stateful(Protocol):
    """Anything with torch's two methods of state: a module, an optimizer, a scheduler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class State:
    """The parts whose state a run has, by name; "model" is among them."""

    def __init__(self, parts: Mapping[str, Stateful]) -> None:
        self._parts = dict(parts)

    def tree(self) -> dict[str, Any]:
        """The state as it is now: tensors are those in use, not copies."""
        return {name: part.state_dict() for name, part in self._parts.items()}

    def load(self, tree: Mapping[str, Any]) -> None:
        """Take up a tree.  Raises ValueError where it is that of other parts, and what the parts raise."""
        if set(tree) != set(self._parts):
            raise ValueError(f"the state has the parts {sorted(tree)}, this worker has {sorted(self._parts)}")
        for name, part in self._parts.items():
            part.load_state_dict(tree[name])

    def digest(self) -> str:
        """Equal where two states are, bit for bit.  Raises TypeError for what cannot be sent to other workers."""
        text, tensors = flatten(self.tree())
        known = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        return f"{digest([known, *tensors]):x}"

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


class Exchange:
    """This worker's end of it: what it gives, and what it gets.  ``host``: by which the other workers reach it."""

    def __init__(self, host: str, secret: bytes) -> None:
        self._store = PeerStoreServer(host, secret)
        self._offers = Offers(self._store.streams)
        self._challenge = Challenge(secret, PURPOSE)
        self._offer: Offer | None = None

    @property
    def address(self) -> str:
        """Where others fetch what is offered."""
        return self._store.address

    def put(self, epoch: int, completed: int, state: State) -> None:
        """Let the others of ``epoch`` have the state, which has ``completed`` steps, until ``withdraw``."""
        tree = {"completed": completed, "state": state.tree()}
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
    ) -> int:
        """Take the state from ``holders`` (worker -> address); the steps that it has.

        ``stay``: called meanwhile; raises to end it.  Raises that, ``PeerLost`` where no holder can give it, and
        ``Disagreement``.
        """
        name = f"{KIND}/{epoch}"

        def source(worker: int, address: str) -> Source:
            return Source(worker, lambda: open_stream(address, self._challenge, name, stay))

        sources = [source(worker, address) for worker, address in sorted(holders.items())]
        receiver = Receiver(sources, state.place(), stay=stay, awaited=stay, progress=progress)
        tree, _ = receiver.fetch(lambda tree: len(flatten(tree)[1]))
        with torch.no_grad():
            state.load(tree["state"])
        return int(tree["completed"])
