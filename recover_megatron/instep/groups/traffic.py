"""Operations on groups that span replicas: their effect depends on the state of the training (``Mode``).

STARTING    before the first epoch: torch's own group
ALONE       while a worker builds its model, or takes a place again: nothing is sent, the worker's own data is the
            result
STEP        inside a training step, which sums the gradients across replicas itself: operations whose purpose this sum
            fulfils are not sent, and any other operation ends the run
SECTION     inside a section: a group of the epoch; a revoke raises EpochRevoked
DEFERRED    as SECTION, but for a section whose workers depend on each other inside their replica (evaluation): after a
            revoke the rest of the section runs with local data, and EpochRevoked is raised at the section's end
OPEN        anywhere else: the group's members carry out the operation once; if some members die, the remaining members
            carry it out (`exchange`)

If no other worker calls the operation, for example because it is called in a signal handler, at most this worker is
affected (`out_of_turn`).

``Among`` names the members that carry out an operation, of those that the caller counts on; ``caller`` finds the code
that called it; ``Staged`` holds the tensors on which it is carried out.
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
"""Operations that read the tensors that they write.  Other operations write the first argument and read the second."""


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Staged:
    """Tensors of one operation, and their host copies, on which the operation is carried out.

        to(backend) --the operation--> wait --bring_back()--> the tensors have the result
                                         '--revoked--> the tensors are unchanged

    Inputs of in-place operations are copied, because an interrupted operation may have overwritten a part of its input,
    and must be repeated.  GPU tensors are copied, too: they are small, and the operation needs them on the host.

    ``away``: returns True for a tensor that is copied in any case.  ``every_result``: True if other results, too, are
    written only by ``bring_back``, so that an operation repeated by fewer workers leaves no data of the first attempt.
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
        """Inputs that ``bring_back`` overwrites."""

    def to(self, backend: Any) -> Any:
        """Wrap the backend for one operation, and forget the results of the last operation."""
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
        """Copy the results of the finished operation to their tensors."""
        with torch.no_grad():
            for original, copy in self._copies:
                original.copy_(copy)

    def _copied(self, value: Any, shared: Callable[[torch.Tensor], bool], written: bool) -> Any:
        """Return ``value`` with host copies in place of its tensors where the class's rules require copies.

        ``shared``: returns True for a tensor that the operation also reads; ``written``: True if it writes ``value``.
        """
        if isinstance(value, (list, tuple)):
            return [self._copied(item, shared, written) for item in value]
        if not isinstance(value, torch.Tensor):
            return value
        if not (self._away(value) or shared(value) or (written and self._every_result)):
            return value
        # Contiguous, as gloo requires, whatever view the original is.
        copy = torch.empty(value.shape, dtype=value.dtype).copy_(value.detach())
        if written:
            self._copies.append((value, copy))
            if shared(value):
                self.spoiled.append(value)
        return copy


T = TypeVar("T")


@dataclass(frozen=True)
class Among:
    """Members that carry out an operation on a group, among those that its caller counts on.

    If members are lost in the middle of the operation, the remaining members carry it out, and all data by rank keeps
    the rank that the caller knows.  ``expected``: slots of the members that the caller counts on, in rank order;
    ``present``: the slots of these that carry out the operation.
    """

    expected: tuple[Slot, ...]
    present: tuple[Slot, ...]

    @property
    def all_there(self) -> bool:
        return len(self.present) == len(self.expected)

    def pick(self, by_rank: Sequence[T]) -> list[T]:
        """Return the entries of present members from a sequence with one entry for each expected rank."""
        return [by_rank[self.expected.index(slot)] for slot in self.present]

    def parts(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts of present members; the tensor has an equal part for each expected member."""
        return self.pick(whole.view(-1).chunk(len(self.expected)))

    def from_root(self, options: Any, of_caller: int) -> Any:
        """Return ``options`` for an operation that sends the data of the caller's rank ``of_caller``.

        Raises Disagreement if the worker at this rank is lost.
        """
        slot = self.expected[of_caller]
        if slot not in self.present:
            raise Disagreement(f"the worker in slot {slot} died while it sent data to the others between two steps")
        options.rootRank = self.present.index(slot)
        return options

    def to_root(self, options: Any, of_caller: int) -> Any:
        """Return ``options`` for an operation with a result for the caller's rank ``of_caller``.

        If the worker at this rank is lost, another member gets the result.
        """
        slot = self.expected[of_caller]
        options.rootRank = self.present.index(slot) if slot in self.present else 0
        return options


_GROUPS = "recover_megatron.instep.groups.process_group"
_BETWEEN = ("recover_megatron", "torch", "typing_extensions", "functools", "contextlib")
"""Packages whose frames may be between a caller and a group."""


@dataclass(frozen=True)
class Caller:
    """A place in a program that calls an operation on a group; ``operation``: the group's method that torch called."""

    module: str
    function: str
    operation: str = ""
    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        return f"{self.operation} at {self.file}:{self.line} ({self.function})"


def caller() -> Caller:
    """Return the code that called the present operation on a group: for rules about known callers, and for errors."""
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
    """State of the training; see the table above."""

    STARTING = "starting"
    ALONE = "alone"
    STEP = "step"
    SECTION = "section"
    DEFERRED = "deferred"
    OPEN = "open"


class OverReplicas(Protocol):
    """A group whose members are in several replicas (``process_group.EpochGroup``)."""

    workers: tuple[Slot, ...]
    """The slots of its members at launch, in rank order."""
    label: str

    @property
    def original(self) -> Any:
        """The torch group of the launch."""

    def among(self, live: frozenset[Slot]) -> tuple[Slot, ...]:
        """Return the slots of the group that are in ``live``, including those to which the run has grown."""


def _call(made: Caller, group: OverReplicas) -> str:
    label = group.label or "without a label"
    return f"{made} spans replicas (group {label} of {len(group.workers)} workers)"


Operation = Callable[[Any, Among], Any]
"""Function that starts one collective on a backend of the present members, and returns the collective's work."""


@dataclass(eq=False)
class Traffic:
    """Carries out the operations of one worker's groups over replicas; ``slot``: its slot until it has a place."""

    slot: Slot
    mode: Mode = Mode.STARTING
    _known: Callable[[Caller], bool] = lambda caller: False
    """Return whether the step itself already fulfils the purpose of an operation that is called inside it."""
    _averages: Callable[[Caller], bool] = lambda caller: False
    """Return whether an operation averages over replicas a value of one microbatch.

    Replicas may run different numbers of microbatches, so the worker keeps its own value, and the mean over all
    microbatches is computed later.
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
        """Return the slots of a group that have a worker now, in the group's order."""
        if self.recovery is None or not self.recovery.assignment.started:
            return group.workers
        return group.among(self.recovery.assignment.live)

    @property
    def standing(self) -> list[Slot]:
        """The slots that have a worker now, by rank; empty before the first epoch."""
        recovery = self.recovery
        return [] if recovery is None or not recovery.assignment.started else list(recovery.assignment.standing)

    @property
    def me(self) -> Slot:
        if self.recovery is None or not self.recovery.assignment.started:
            return self.slot
        return self.recovery.assignment.slot

    def is_mate(self, slot: Slot) -> bool:
        """Return whether ``slot`` is in this worker's replica; before the first epoch True for every slot."""
        recovery = self.recovery
        return recovery is None or recovery.assignment.grid.place(slot)[0] == recovery.assignment.replica

    def agreement_is_enough(self, group: OverReplicas) -> bool:
        """Carry out a barrier of all workers as a decision that all report; return False if it must be sent instead."""
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
        """Carry out one operation, as ``mode`` requires.

        ``alone``: does what the operation would do if this worker were the only member; ``alike``: does what it would
        do if all members had this worker's data.
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
                self.refuse(made, group, "inside a training step, and --recover does not know its purpose")
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
        """Terminate the run for all workers: after this operation replicas would diverge, or wait for ever."""
        self._in_turn(group, made)
        message = (
            f"{_call(made, group)} {where}. --recover itself exchanges all data that replicas need: switch off the "
            "code that makes this call, move it behind the step, or train without --recover (docs/troubleshooting.md)"
        )
        if self.recovery is not None:
            self.recovery.session.give_up(1, message)
        raise UnknownOperation(message)

    def _in_turn(self, group: OverReplicas, made: Caller | None = None) -> None:
        """Terminate this worker or thread if no other worker will call the operation; ``made``: who calls it here."""
        threads = self.mode not in (Mode.STARTING, Mode.ALONE)
        out_of_turn.keep_in_turn(lambda: _call(made or caller(), group), threads=threads)

    def _once(self, group: OverReplicas, operation: Operation) -> None:
        """Carry out an operation outside of decisions; the tensors get the result when it is over for all members."""
        recovery, staged, members = self.recovery, Staged(every_result=True), self.members(group)
        assert recovery is not None

        def perform(backend: TreeBackend, present: Sequence[Slot]) -> None:
            recovery.progress.inject("traffic")
            among = Among(members, tuple(present))
            backend.call(lambda on: operation(staged.to(on), among))

        recovery.exchange.run(group.label, group.workers, members, perform)
        staged.bring_back()

    def _inside(self, group: OverReplicas, operation: Operation) -> None:
        """Carry out an operation in a section; keep overwritten inputs, since the section may run again."""
        assert self.recovery is not None
        epoch_groups, members = self.recovery.assignment.epoch_groups, self.members(group)
        self.recovery.progress.inject("traffic")
        with epoch_groups.lost_ends_it(), self.recovery.progress.waiting(f"{group.label} operation"):
            backend = epoch_groups.control(group.label, members)
            staged = Staged()
            backend.call(lambda on: operation(staged.to(on), Among(members, members)))
            self.recovery.sections.kept.keep(staged.spoiled)
            staged.bring_back()
