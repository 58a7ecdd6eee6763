"""Carries out operations on groups that span replicas; the state of the training (``Mode``) decides how.

STARTING    before the first epoch: torch's own group carries out the operation
ALONE       while a worker builds its model, or takes a place again: nothing is sent, and the worker's own data is
            the result
STEP        inside a training step, which sums the gradients over replicas itself: an operation that is unnecessary
            there (``Traffic._known``) is not sent, and any other operation ends the run
SECTION     inside a section: a group of the epoch carries out the operation; a revoke raises EpochRevoked
DEFERRED    as SECTION, for a section whose workers depend on each other inside their replica (evaluation): after a
            revoke the section continues with local data, and EpochRevoked is raised at the section's end
OPEN        anywhere else: the group's members carry out the operation once; if some members die, the remaining members
            carry it out (`exchange`)

If only this worker calls an operation, for example in a signal handler, at most this worker is stopped (`out_of_turn`).

``Among`` names the live members that carry out an operation; ``caller`` finds the code that called the operation;
``Staged`` holds copies of the operation's tensors.
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
"""Operations that overwrite the tensors that they read; all others write their first argument, and read the second."""


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Staged:
    """Tensors of one operation, and the host copies that the operation uses in their place.

        to(backend) --the operation--> wait --bring_back()--> the tensors have the result
                                         '--revoked--> the tensors are unchanged

    Inputs of in-place operations are copied, because an interrupted operation may have overwritten a part of its input,
    and must be repeated.  GPU tensors are copied, too: they are small, and the operation needs them on the host.

    ``away``: function that returns True for a tensor that must always be copied.  ``every_result``: True if every
    tensor that the operation writes must be copied; then, if fewer workers repeat the operation, no data of the first
    attempt remains.
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
        """Inputs of the operation that ``bring_back`` overwrites."""

    def to(self, backend: Any) -> Any:
        """Make the next operation on ``backend`` use host copies; drop the copies of the last operation.  Returns this
        object, on which the operation must be called."""
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
        """Copy the results of the finished operation to the caller's tensors."""
        with torch.no_grad():
            for original, copy in self._copies:
                original.copy_(copy)

    def _copied(self, value: Any, shared: Callable[[torch.Tensor], bool], written: bool) -> Any:
        """Return ``value``, an argument of the operation, with host copies in place of tensors that must be copied.

        ``written``: True if the operation writes this argument.  ``shared``: function that returns True for a
        tensor that the operation also reads.
        """
        if isinstance(value, (list, tuple)):
            return [self._copied(item, shared, written) for item in value]
        if not isinstance(value, torch.Tensor):
            return value
        if not (self._away(value) or shared(value) or (written and self._every_result)):
            return value
        # The copy is contiguous, as gloo requires, even if the original is a view.
        copy = torch.empty(value.shape, dtype=value.dtype).copy_(value.detach())
        if written:
            self._copies.append((value, copy))
            if shared(value):
                self.spoiled.append(value)
        return copy


T = TypeVar("T")


@dataclass(frozen=True)
class Among:
    """Live members that carry out an operation on a group.

    ``expected``: slots of all members when the operation was called; the caller's data is in the same order.
    ``present``: slots of the members that carry out the operation.
    """

    expected: tuple[Slot, ...]
    present: tuple[Slot, ...]

    @property
    def all_there(self) -> bool:
        return len(self.present) == len(self.expected)

    def pick(self, by_rank: Sequence[T]) -> list[T]:
        """Return the present members' entries of a sequence that has one entry for each expected member."""
        return [by_rank[self.expected.index(slot)] for slot in self.present]

    def parts(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Return the present members' parts of a tensor that has equal-sized parts, one for each expected member."""
        return self.pick(whole.view(-1).chunk(len(self.expected)))

    def from_root(self, options: Any, of_caller: int) -> Any:
        """Set the root in ``options``, for an operation that sends the root's data to all members; return ``options``.

        ``of_caller``: the root's rank among the expected members.  Raises Disagreement if this member is lost.
        """
        slot = self.expected[of_caller]
        if slot not in self.present:
            raise Disagreement(f"the worker in slot {slot} died while it sent data to other workers between two steps")
        options.rootRank = self.present.index(slot)
        return options

    def to_root(self, options: Any, of_caller: int) -> Any:
        """Set the root in ``options``, for an operation whose result only the root gets; return ``options``.

        ``of_caller``: the root's rank among the expected members.  If this member is lost, another member gets the
        result.
        """
        slot = self.expected[of_caller]
        options.rootRank = self.present.index(slot) if slot in self.present else 0
        return options


_GROUPS = "recover_megatron.instep.groups.process_group"
_BETWEEN = ("recover_megatron", "torch", "typing_extensions", "functools", "contextlib")
"""Packages whose stack frames ``caller`` skips."""


@dataclass(frozen=True)
class Caller:
    """Line of code that calls an operation on a group.  ``operation``: method of the group that torch called."""

    module: str
    function: str
    operation: str = ""
    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        return f"{self.operation} at {self.file}:{self.line} ({self.function})"


def caller() -> Caller:
    """Return the code outside torch and this project that called the present operation on a group."""
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
    """State of the training, which decides how operations are carried out; see the module's table."""

    STARTING = "starting"
    ALONE = "alone"
    STEP = "step"
    SECTION = "section"
    DEFERRED = "deferred"
    OPEN = "open"


class OverReplicas(Protocol):
    """A group whose members are in several replicas (``process_group.EpochGroup``)."""

    workers: tuple[Slot, ...]
    """Slots of the group's members at launch, in rank order."""
    label: str

    @property
    def original(self) -> Any:
        """The torch group of the launch."""

    def among(self, live: frozenset[Slot]) -> tuple[Slot, ...]:
        """Return the group's slots in ``live``, including slots of replicas that were added after the launch."""


def _call(made: Caller, group: OverReplicas) -> str:
    label = group.label or "without a label"
    return f"{made} spans replicas (group {label} of {len(group.workers)} workers)"


Operation = Callable[[Any, Among], Any]
"""Function that starts one collective on a backend of the present members, and returns the torch ``Work``."""


@dataclass(eq=False)
class Traffic:
    """Carries out the operations of one worker's groups over replicas.  ``slot``: the worker's slot until it has a
    place."""

    slot: Slot
    mode: Mode = Mode.STARTING
    _known: Callable[[Caller], bool] = lambda caller: False
    """Function that returns whether a caller's operation is unnecessary inside a step, because the step computes the
    result itself, or no result depends on the operation."""
    _averages: Callable[[Caller], bool] = lambda caller: False
    """Function that returns whether a caller's operation averages a value of one microbatch over replicas.

    Such an operation is not sent, since replicas may run different numbers of microbatches.  The worker keeps its own
    value, and the mean over all microbatches is computed later.
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
        """Return the slots of ``group`` that have a worker now, in rank order."""
        if self.recovery is None or not self.recovery.assignment.started:
            return group.workers
        return group.among(self.recovery.assignment.live)

    @property
    def occupied_slots(self) -> list[Slot]:
        """All slots that have a worker now, in the order of the ranks; empty before the first epoch."""
        recovery = self.recovery
        return [] if recovery is None or not recovery.assignment.started else list(recovery.assignment.occupants)

    @property
    def me(self) -> Slot:
        if self.recovery is None or not self.recovery.assignment.started:
            return self.slot
        return self.recovery.assignment.slot

    def is_mate(self, slot: Slot) -> bool:
        """Return whether ``slot`` is in this worker's replica; True for every slot before the first epoch."""
        recovery = self.recovery
        return recovery is None or recovery.assignment.grid.place(slot)[0] == recovery.assignment.replica

    def agreement_is_enough(self, group: OverReplicas) -> bool:
        """Carry out a barrier of all workers as a section, if possible; return False if the barrier must be sent."""
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
        """Carry out one operation in the way that ``mode`` requires.

        ``alone``: function that computes the result as if this worker were the only member.  ``alike``: function that
        computes the result as if all members had this worker's data.
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
        """Terminate the run for all workers, since this operation would make replicas diverge or wait forever."""
        self._in_turn(group, made)
        message = (
            f"{_call(made, group)} {where}. --recover itself exchanges all data that replicas need: switch off the "
            "code that makes this call, move it behind the step, or train without --recover (docs/troubleshooting.md)"
        )
        if self.recovery is not None:
            self.recovery.session.give_up(1, message)
        raise UnknownOperation(message)

    def _in_turn(self, group: OverReplicas, made: Caller | None = None) -> None:
        """Terminate this worker or thread if no other worker will call the operation (`out_of_turn`).

        ``made``: the calling code, if it is known.
        """
        threads = self.mode not in (Mode.STARTING, Mode.ALONE)
        out_of_turn.keep_in_turn(lambda: _call(made or caller(), group), threads=threads)

    def _once(self, group: OverReplicas, operation: Operation) -> None:
        """Carry out an operation outside of decisions; write the result when the operation is over for all members."""
        recovery, staged, members = self.recovery, Staged(every_result=True), self.members(group)
        assert recovery is not None

        def perform(backend: TreeBackend, present: Sequence[Slot]) -> None:
            recovery.progress.inject("traffic")
            among = Among(members, tuple(present))
            backend.call(lambda on: operation(staged.to(on), among))

        recovery.exchange.run(group.label, group.workers, members, perform)
        staged.bring_back()

    def _inside(self, group: OverReplicas, operation: Operation) -> None:
        """Carry out an operation in a section; save inputs that are overwritten, since the section may run again."""
        assert self.recovery is not None
        epoch_groups, members = self.recovery.assignment.epoch_groups, self.members(group)
        self.recovery.progress.inject("traffic")
        with epoch_groups.lost_ends_it(), self.recovery.progress.waiting(f"{group.label} operation"):
            backend = epoch_groups.control(group.label, members)
            staged = Staged()
            backend.call(lambda on: operation(staged.to(on), Among(members, members)))
            self.recovery.sections.kept.keep(staged.spoiled)
            staged.bring_back()
