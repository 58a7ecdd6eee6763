"""What an operation on a group that reaches over replicas does, by where the training is (``Mode``).

STARTING    before the first epoch: torch's own group, as it was made
ALONE       while a worker builds its model, or is on its way back: nothing is sent, it hears only itself
STEP        inside a training step, which sums by itself what crosses replicas: what is known to be summed already
            is sent no more, and anything else ends the run
SECTION     inside a section: a group of the epoch; a revocation raises EpochRevoked ...
DEFERRED    ... or, in a section whose workers depend on each other inside their replica (evaluation), lets the rest
            of the section run with what is at hand; its end tells
OPEN        anywhere else: the group's members carry it out once, those who are left if some die (`exchange`)

Where no other worker comes to it, in a handler of a signal say, it costs its worker at most (`out_of_turn`).

``Among`` says which of the members that the caller counts on carry it out; ``caller`` finds the call that asks for it;
``Staged`` has what it is carried out on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NoReturn, Protocol, TypeVar

import torch

from recover_megatron import out_of_turn
from recover_megatron.collectives.epoch import EpochRevoked
from recover_megatron.collectives.tree import TreeBackend
from recover_megatron.errors import Disagreement
from recover_megatron.instep.faults import UnknownOperation
from recover_megatron.instep.recovery import Recovery
from recover_megatron.workload.grid import Slot

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
    """The tensors of one operation, and the copies on the host that it is carried out on in their place.

        to(backend) --the operation--> wait --bring_back()--> the tensors have the result
                                         '--revoked--> they are as they were

    An operation in place writes over its input, and one that is interrupted has written over a part of it; it may have
    to be carried out once more.  Tensors of a GPU are copied, too: they are small, and it needs them on the host.

    ``away``: which tensors are copied in any case.  ``every_result``: also results that are no input are written when
    they are brought back, and not before: where fewer workers may repeat the operation nothing is left of the others.
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


T = TypeVar("T")


@dataclass(frozen=True)
class Among:
    """The members that carry out an operation on a group, of those whom its caller counts on.

    Where some are lost in the middle of the operation the others carry it out, and everything that is given by rank
    stays at the rank that the caller knows.  Slots, in rank order: ``present`` of those ``expected`` by the caller.
    """

    expected: tuple[Slot, ...]
    present: tuple[Slot, ...]

    @property
    def all_there(self) -> bool:
        return len(self.present) == len(self.expected)

    def pick(self, by_rank: Sequence[T]) -> list[T]:
        """Of what is given by rank, the parts of those present."""
        return [by_rank[self.expected.index(slot)] for slot in self.present]

    def parts(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """The equal parts of a tensor, one for each that is expected, that belong to those present."""
        return self.pick(whole.view(-1).chunk(len(self.expected)))

    def from_root(self, options: Any, of_caller: int) -> Any:
        """``options`` for an operation that hands out what rank ``of_caller`` has.  Disagreement when it is gone."""
        slot = self.expected[of_caller]
        if slot not in self.present:
            raise Disagreement(f"the worker in slot {slot} died while it gave the others something between two steps")
        options.rootRank = self.present.index(slot)
        return options

    def to_root(self, options: Any, of_caller: int) -> Any:
        """``options`` for an operation whose result rank ``of_caller`` gets.  When it is gone, somebody gets it."""
        slot = self.expected[of_caller]
        options.rootRank = self.present.index(slot) if slot in self.present else 0
        return options


_GROUPS = "recover_megatron.instep.groups.process_group"
_BETWEEN = ("recover_megatron", "torch", "typing_extensions", "functools", "contextlib")
"""Packages whose frames may lie between a caller and a group."""


@dataclass(frozen=True)
class Caller:
    """A place in a program, and what it does with a group (the method of the group that torch called)."""

    module: str
    function: str
    operation: str = ""
    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        return f"{self.operation} at {self.file}:{self.line} ({self.function})"


def caller() -> Caller:
    """The caller of the operation on a group that is under way: the recovery knows some, an error names the place."""
    frame, operation = sys._getframe(1), ""
    while frame.f_back is not None and _module(frame).partition(".")[0] in _BETWEEN:
        if _module(frame) == _GROUPS:
            operation = frame.f_code.co_name
        frame = frame.f_back
    return Caller(_module(frame), frame.f_code.co_name, operation, frame.f_code.co_filename, frame.f_lineno)


def _module(frame: Any) -> str:
    return str(frame.f_globals.get("__name__", ""))


WORLD = "world"
"""Label of the default group."""


class Mode(Enum):
    """Where the training is; see the table above."""

    STARTING = "starting"
    ALONE = "alone"
    STEP = "step"
    SECTION = "section"
    DEFERRED = "deferred"
    OPEN = "open"


class OverReplicas(Protocol):
    """A group whose members stand in several replicas (``process_group.EpochGroup``)."""

    workers: tuple[Slot, ...]
    """The slots of its members at launch, in rank order."""
    label: str

    @property
    def original(self) -> Any:
        """Torch's own group of the launch."""

    def among(self, live: frozenset[Slot]) -> tuple[Slot, ...]:
        """The slots of the group, those that the run has grown to with them, that are in ``live``."""


def _told(made: Caller, group: OverReplicas) -> str:
    label = group.label or "without a name"
    return f"{made} reaches over replicas (group {label} of {len(group.workers)} workers)"


Operation = Callable[[Any, Among], Any]
"""Starts one collective on a backend, whose members are those present, and returns its work."""


@dataclass(eq=False)
class Traffic:
    """Carries out the operations of all groups over replicas of a worker, which stands (or will stand) in ``slot``."""

    slot: Slot
    mode: Mode = Mode.STARTING
    _known: Callable[[Caller], bool] = lambda caller: False
    """Whether the step has done already what an operation inside it is for."""
    _averages: Callable[[Caller], bool] = lambda caller: False
    """Whether an operation is of a mean over replicas of what each has of one microbatch.

    Replicas need not run equally many. A worker keeps its own, and the mean is that of all microbatches, made later.
    """
    recovery: Recovery | None = field(default=None, init=False)

    @contextmanager
    def during(self, mode: Mode) -> Iterator[None]:
        before, self.mode = self.mode, mode
        try:
            yield
        finally:
            self.mode = before

    def members(self, group: OverReplicas) -> tuple[Slot, ...]:
        """The slots of a group in which somebody stands now, in its order."""
        if self.recovery is None or not self.recovery.assignment.started:
            return group.workers
        return group.among(self.recovery.assignment.live)

    @property
    def standing(self) -> list[Slot]:
        """The slots in which somebody stands now, by rank; empty before the first epoch."""
        recovery = self.recovery
        return [] if recovery is None or not recovery.assignment.started else list(recovery.assignment.standing)

    @property
    def me(self) -> Slot:
        if self.recovery is None or not self.recovery.assignment.started:
            return self.slot
        return self.recovery.assignment.slot

    def is_mate(self, slot: Slot) -> bool:
        """Whether that slot is in this worker's replica; before the first epoch everybody is there."""
        recovery = self.recovery
        return recovery is None or recovery.assignment.grid.place(slot)[0] == recovery.assignment.replica

    def agreement_is_enough(self, group: OverReplicas) -> bool:
        """Carry out a barrier of all workers outside sections: that all have reported one more decision is one."""
        self._in_turn(group)
        if self.mode is not Mode.OPEN or self.recovery is None or group.label != WORLD:
            return False
        self.recovery.sections.run("barrier", lambda: None)
        return True

    def run(
        self,
        group: OverReplicas,
        operation: Operation,
        alone: Callable[[], None],
        alike: Callable[[], None] | None = None,
    ) -> None:
        """Carry out one operation.

        ``alone``: its effect if this worker were the only member; ``alike``: if all members had what this one has.
        """
        self._in_turn(group)
        if alike is not None and self.mode in (Mode.STEP, Mode.DEFERRED) and self._averages(caller()):
            alike()
        elif self.mode is Mode.STARTING:
            work = operation(group.original, Among(group.workers, group.workers))
            if work is not None:
                work.wait()
        elif self.mode is Mode.ALONE:
            alone()
        elif self.mode is Mode.STEP:
            if not self._known(made := caller()):
                self.refuse(made, group, "inside a training step, where it does not know what that is for")
            alone()
        elif self.mode is Mode.OPEN:
            self._once(group, operation)
        elif self.mode is Mode.DEFERRED and self.recovery is not None and self.recovery.assignment.epoch_groups.over:
            alone()
        else:
            try:
                self._inside(group, operation)
            except EpochRevoked:
                if self.mode is not Mode.DEFERRED:
                    raise
                alone()

    def refuse(self, made: Caller, group: OverReplicas, where: str) -> NoReturn:
        """End the run, for all: replicas would drift apart, or wait for each other for ever."""
        self._in_turn(group, made)
        message = (
            f"{_told(made, group)} {where}. --recover does what replicas need of each other by itself; switch off what "
            "calls this, move it behind the step, or train without --recover (docs/footguns.md)"
        )
        if self.recovery is not None:
            self.recovery.session.give_up(1, message)
        raise UnknownOperation(message)

    def _in_turn(self, group: OverReplicas, made: Caller | None = None) -> None:
        """End the worker or the thread that makes an operation where no other worker comes; ``made``: its caller."""
        threads = self.mode not in (Mode.STARTING, Mode.ALONE)
        out_of_turn.keep_in_turn(lambda: _told(made or caller(), group), threads=threads)

    def _once(self, group: OverReplicas, operation: Operation) -> None:
        """Outside of decisions: the tensors get the result when it is over for all."""
        recovery, staged, members = self.recovery, Staged(every_result=True), self.members(group)
        assert recovery is not None

        def perform(backend: TreeBackend, present: Sequence[Slot]) -> None:
            recovery.progress.inject("traffic")
            among = Among(members, tuple(present))
            backend.call(lambda on: operation(staged.to(on), among))

        recovery.exchange.run(group.label, group.workers, members, perform)
        staged.bring_back()

    def _inside(self, group: OverReplicas, operation: Operation) -> None:
        """In a section: a second run of it finds its tensors as the first one did."""
        assert self.recovery is not None
        epoch_groups, members = self.recovery.assignment.epoch_groups, self.members(group)
        self.recovery.progress.inject("traffic")
        with epoch_groups.lost_ends_it(), self.recovery.progress.waiting(f"{group.label} operation"):
            backend = epoch_groups.control(group.label, members)
            staged = Staged()
            backend.call(lambda on: operation(staged.to(on), Among(members, members)))
            self.recovery.sections.kept.keep(staged.spoiled)
            staged.bring_back()
