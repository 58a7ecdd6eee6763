"""What the workers of a run hold: its state, which newcomers take from others, and the gradients of the step.

The state is a tree: ``state_dict()`` of the model, of the optimizer, and of whatever else was named.

    holder     put(epoch) ----- the tree stands until ``withdraw``, before the optimizer's step changes it
    newcomer   fetch(epoch, holders) ----- parameters arrive in their own memory, the rest in new memory, then is loaded

Which workers hold it, and which worker runs which microbatch, each member works out by itself, from the statuses with
which all have joined: the plan of the epoch has them.

    joined with   completed=7  holds  ran=(0, 3)     died in step 8: its 1 and 4 are lost
                  completed=7  holds  ran=(2, 5)
                  completed=0  -      ran=()         a newcomer: takes the state, and runs nothing in this step
    shares        8: {0: [1], 1: [4], 2: []}         from step 9 on all three
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from typing import Any, Protocol

import torch

from recover_megatron import program
from recover_megatron.collectives.state_transport import digest
from recover_megatron.elastic.restoring import NotRestored, as_sent, contents, difference, is_container
from recover_megatron.errors import UserError
from recover_megatron.instep.state_holder import KIND, Offer, Offers, Path, flatten, new_memory
from recover_megatron.instep.state_receiver import Receiver, Source
from recover_megatron.logger import get_logger
from recover_megatron.membership.records import Json
from recover_megatron.network.connection import Challenge
from recover_megatron.network.peer_store import PeerStoreServer, open_stream
from recover_megatron.workload import reassign

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
        flatten(tree)
    except TypeError as error:
        return str(error)
    return ""


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


@dataclass(frozen=True)
class Status:
    """What a worker joins an epoch with."""

    completed: int = 0
    """The last step that its state has."""
    holds: bool = False
    """Whether it has a state to go on from; a worker that comes into a running job has none."""
    digest: str = ""
    """Of a state that no step of this run has changed yet; empty afterwards: then all holders have the same."""
    ran: tuple[int, ...] = ()
    """The microbatches of step ``completed + 1`` whose gradients it holds."""
    address: str = ""
    """Of its peer store: where its state is fetched."""
    flags: str = ""
    code: str = ""
    """Digests of what it was given and of its program, which must be the run's (`instep.comparison`)."""
    covered: str = ""
    """The parameters that have a part of its buckets (`Gradients.covered`)."""
    todo: int = 0
    """How many calls it would have to make for all if it led: those of `lead` since step ``completed``."""
    leaving: bool = False
    """Whether it has no further step: it waits until nothing is left for it to do, and leaves."""

    def to_json(self) -> Json:
        return asdict(self)

    @classmethod
    def from_json(cls, told: Json) -> Status:
        """Read a status, without fields that another version of this package has added.

        A worker of another version is refused; it must not end the worker that reads its status.
        """
        known = {field.name: told[field.name] for field in fields(cls) if field.name in told}
        return cls(**{**known, "ran": tuple(told.get("ran", ()))})

    @staticmethod
    def settings(
        model: torch.nn.Module, microbatches: int, seed: int | None, verify_interval: int, state: Mapping[str, Stateful]
    ) -> dict[str, str]:
        """The settings whose digest is ``flags``: name -> text."""
        trained = {name: its for name, its in model.named_parameters() if its.requires_grad}
        orders = {
            name: "" if its.is_contiguous() else f", strides {list(its.stride())}" for name, its in trained.items()
        }
        parameters = {
            f"parameter {name}": f"{its.dtype} {list(its.shape)}{orders[name]}" for name, its in trained.items()
        }
        others = {"microbatches": str(microbatches), "seed": str(seed), "verify_interval": str(verify_interval)}
        others["state"] = ", ".join(sorted(state))
        order = hashlib.blake2b("\n".join(trained).encode(), digest_size=8).hexdigest()
        return {"recover_megatron": program.VERSION, "the order of the parameters": order, **others, **parameters}

    def after(self, committed: int) -> Status:
        """As it is when what the rendezvous has found committed is applied: at most the step it was in."""
        if self.completed >= committed:
            return self
        return replace(self, completed=committed, digest="", ran=())


@dataclass(frozen=True)
class Standing:
    """How an epoch begins."""

    completed: int
    """The last step that the state of the run has."""
    holders: tuple[int, ...]
    """The workers that have that state, ascending; the other members fetch it from them."""


def standing(statuses: Mapping[int, Status], committed: int) -> Standing | None:
    """The state of the run and who holds it; None: nobody does.

    At the start workers may differ (another seed, a checkpoint that only some have): the holders are those that have
    completed most steps and, of these, have just the same state as the one with the lowest id.
    """
    now = {worker: status.after(committed) for worker, status in sorted(statuses.items()) if status.holds}
    if not now:
        return None
    completed = max(status.completed for status in now.values())
    newest = {worker: status for worker, status in now.items() if status.completed == completed}
    lead = next(iter(newest.values()))
    return Standing(completed, tuple(worker for worker, status in newest.items() if status.digest == lead.digest))


def odd_cover(statuses: Mapping[int, Status], at: Standing) -> int | None:
    """The first of those that hold the state which covers other parameters than the lowest; None: none does.

    Those that joined before the last step was finished do not count: they may not have unfrozen a layer yet.
    """
    told = {worker: statuses[worker].covered for worker in at.holders if statuses[worker].completed == at.completed}
    return next((worker for worker, covered in told.items() if covered != next(iter(told.values()))), None)


def shares(
    statuses: Mapping[int, Status], at: Standing, members: Sequence[int], step: int, microbatches: int
) -> dict[int, list[int]]:
    """Worker -> ids that it runs, of the ``microbatches`` of ``step`` that nobody had when the epoch began.

    In the epoch's first step only holders have a part: the others are getting the state.
    """
    if step != at.completed + 1:
        return _everybodys(tuple(sorted(members)), microbatches)
    workers = at.holders
    had = {w: statuses[w].ran if statuses[w].completed == at.completed else () for w in workers}
    lost = sorted(set(range(microbatches)).difference(*had.values()))
    dealt = reassign(lost, 1, workers, load={worker: len(ran) for worker, ran in had.items()})
    return {worker: dealt[worker][0] for worker in workers}


@lru_cache(maxsize=1)
def _everybodys(workers: tuple[int, ...], microbatches: int) -> dict[int, list[int]]:
    """The same in each step of an epoch but the first: with many workers it takes a part of a millisecond."""
    dealt = reassign(list(range(microbatches)), 1, workers, load=dict.fromkeys(workers, 0))
    return {worker: dealt[worker][0] for worker in workers}
