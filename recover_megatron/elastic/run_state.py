"""State of a run, and its transfer from holders to newcomers.

The state is a tree: ``state_dict()`` of the model, of the optimizer, and of all other named parts.

    holder     put(epoch) ----- offers the tree until ``withdraw``, which comes before the optimizer's step
    newcomer   fetch(epoch, holders) ----- receives the model in place, the rest in new memory, then loads the tree
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
from recover_megatron.network.peer_store import PeerStoreServer, open_stream

log = get_logger(__name__)


class Stateful(Protocol):
    """Object with torch's two state methods: a module, an optimizer, a scheduler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class Optimizers:
    """Several optimizers with the interface of one optimizer; their common state is a dictionary, number -> state."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = list(optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of all optimizers."""
        return [group for optimizer in self.optimizers for group in getattr(optimizer, "param_groups", ())]

    def step(self) -> None:
        """Step each optimizer with the gradients of its parameters."""
        for optimizer in self.optimizers:
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the states by number: ``{"0": ..., "1": ...}``."""
        return {str(number): optimizer.state_dict() for number, optimizer in enumerate(self.optimizers)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the states by number.  Raises ValueError if ``state_dict`` is not from the same number of optimizers."""
        if (wanted := set(map(str, range(len(self.optimizers))))) != set(state_dict):
            raise ValueError(f"the optimizers' state has the keys {sorted(state_dict)}, expected {sorted(wanted)}")
        for number, optimizer in enumerate(self.optimizers):
            optimizer.load_state_dict(state_dict[str(number)])


class State:
    """State of a run, made of named parts; the part "model" is a module."""

    def __init__(self, parts: Mapping[str, Stateful]) -> None:
        self._parts = dict(parts)
        model: Any = parts["model"]
        saved = model.state_dict()
        frozen = {name: val for name, val in model.named_parameters() if not val.requires_grad}
        names = [name.rpartition(".") for name in {**dict(model.named_buffers()), **frozen} if name in saved]
        self._untrained = [(path + dot + val, model.get_submodule(path), val) for path, dot, val in names]

    def tree(self) -> dict[str, Any]:
        """Return the current state as a tree; its tensors share memory with the model and the optimizer."""
        return {name: part.state_dict() for name, part in self._parts.items()}

    def load(self, tree: Mapping[str, Any], *, copied: bool = False) -> None:
        """Load ``tree`` into the parts.  Raises ValueError if the names of parts differ; raises the parts' errors.

        ``copied``: True to load a copy of ``tree``.  If False, the optimizers keep and change the tensors of ``tree``.
        """
        if set(tree) != set(self._parts):
            raise ValueError(f"the state has the parts {sorted(tree)}, this worker has {sorted(self._parts)}")
        # If the checkpoint's model has other dtypes than this model, torch may cast the optimizer's state as usual.
        same_types = _types(tree["model"]) == _types(self._parts["model"].state_dict())
        for name, part in self._parts.items():
            with as_sent(part) if same_types else contextlib.nullcontext():
                part.load_state_dict(copy.deepcopy(tree[name]) if copied else tree[name])

    def check(self) -> None:
        """Raise UserError, with all reasons, if a part of the state cannot be sent to other workers."""
        found = self.tree().items()
        reasons = [f"state of {name!r}: {why}" for name, val in found if (why := _cannot_be_sent(val))]
        if reasons:
            raise UserError(*reasons)

    def digest(self) -> str:
        """Return a digest of the state, equal for states that are equal bit for bit.  Raises as ``check`` does."""
        self.check()
        text, tensors = flatten(self.tree())
        known = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        return f"{digest([known, *tensors]):x}"

    def described(self) -> dict[str, str]:
        """Return value name -> description: a text, or a tensor's dtype, shape and digest.

        States that are equal bit for bit have equal descriptions.  The order of keys does not count, since a load may
        have changed it.
        """
        found = {".".join(map(str, path)): val for path, val in contents(self.tree()).items() if not is_container(val)}
        return {name: f"{text} {number}" for name, (text, number) in sorted(found.items())}

    def untrained(self) -> dict[str, tuple[torch.Tensor | None, int]]:
        """Return name -> (tensor, version counter) for the buffers and frozen parameters of the model's state."""
        tensors = ((name, getattr(module, val, None)) for name, module, val in self._untrained)
        # An inference tensor has no version counter; use 0, since it changes only in torch's inference mode.
        return {name: (val, 0 if val is None or val.is_inference() else val._version) for name, val in tensors}

    def changed(self, since: Mapping[str, tuple[torch.Tensor | None, int]]) -> list[str]:
        """Return the names of tensors that were changed in place or replaced after ``untrained`` returned ``since``.

        A BatchNorm's running statistics change without a new version, but ``num_batches_tracked``, which changes with
        them, gets a new version.
        """
        now = self.untrained()
        return [name for name, (val, count) in since.items() if now[name][0] is not val or now[name][1] != count]

    def place(self) -> Callable[[Path, Sequence[int], torch.dtype], torch.Tensor]:
        """Return a ``Place`` that puts the model's tensors of a received tree into the memory of this model.

        If a transfer fails midway, the model is partly overwritten, and the state must be fetched again.
        """
        model = {name: value for name, value in self._parts["model"].state_dict().items() if torch.is_tensor(value)}

        def place(path: Path, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
            own = model.get(str(path[-1])) if len(path) == 3 and path[:2] == ("state", "model") else None
            fits = own is not None and own.is_contiguous() and list(own.shape) == list(shape) and own.dtype == dtype
            return own.detach() if own is not None and fits else new_memory(path, shape, dtype)

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
    """Sends this worker's state to other workers, or fetches their state.  ``host``: address at which they reach it."""

    def __init__(self, host: str, secret: bytes) -> None:
        self.store = PeerStoreServer(host, secret)
        self._offers = Offers(self.store.streams)
        self._secret = secret
        self._offer: Offer | None = None

    @property
    def address(self) -> str:
        """Address of this worker's peer store, from which other workers fetch the state."""
        return self.store.address

    def put(self, epoch: int, completed: int, trained: Sequence[bool], state: State) -> None:
        """Offer the state after step ``completed`` to the other workers of ``epoch``, until ``withdraw``.

        ``trained``: for each parameter of the model, True if it is trainable.  If the state cannot be sent, the other
        workers receive the reason instead and exit, and this worker continues to train.
        """
        tree = {"completed": completed, "trained": list(trained), "state": state.tree()}
        if why := _cannot_be_sent(tree["state"]):
            log.warning(f"new workers exit, since they cannot receive the state after step {completed}: {why}")
            tree = {"why": why}
        self._offer = self._offers.put(str(epoch), Offer(tree, shared=len(flatten(tree)[1])))

    def withdraw(self) -> None:
        """Stop offering this worker's state, before it changes.  Idempotent."""
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
        """Fetch the state from ``holders`` (worker -> address) and load it; return its last step and ``trained`` flags.

        ``stay`` is called repeatedly, and aborts the transfer by raising an error.  ``progress`` is called when data
        arrives.  Raises the errors of ``stay``, ``PeerLost`` if all holders are lost, ``Disagreement`` if the received
        data is damaged, and ``NotRestored`` if a holder cannot send its state, or if loading has changed the state.
        """
        name = f"{KIND}/{epoch}"

        def source(worker: int, address: str) -> Source:
            return Source(worker, lambda: open_stream(address, self._secret, name, stay))

        sources = [source(worker, address) for worker, address in sorted(holders.items())]
        receiver = Receiver(sources, state.place(), stay=stay, awaited=stay, progress=progress)
        tree, _ = receiver.fetch(lambda tree: len(flatten(tree)[1]))
        if why := tree.get("why"):
            raise NotRestored(f"the other workers cannot send their state: {why}")
        sent = contents(tree["state"])
        with torch.no_grad():
            state.load(tree["state"])
        if differs := difference(sent, contents(state.tree())):
            raise NotRestored(
                "load_state_dict() did not restore the state of the other workers (it must restore everything that "
                f"state_dict() returns): {differs}"
            )
        return int(tree["completed"]), list(tree["trained"])
