"""What a training loop on megatron.core has to offer so that a step survives deaths: an interface with a version.

    Loop     the seams of one training loop, what recovery asks of it, and the version it was written for
    ROLES    what each seam is: when the loop calls it, with which arguments, what it returns
    Seam     a function of the loop, by module, name and parameters, checked before anything is wrapped

Each role is one function of the loop.  Its wrapper is called in place of the loop's function, with the role's
``parameters`` first, by position or by name, and whatever the loop has besides; it calls the loop's function with the
same, and returns what that returns.  A loop whose function takes its arguments otherwise translates (``Seam.adapt``).

The loops that come with this package are Megatron-LM's (``megatron_hooks.loop.megatron_lm``) and Megatron-Bridge's
(``megatron_hooks.loop.bridge``); docs/integrate.md says how another one is written, and what is promised.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from recover_megatron.errors import UserError

__all__ = ["INTERFACE", "ROLES", "Loop", "Role", "Seam", "Services", "Wrapper", "misfit", "wrap"]

Function = Callable[..., Any]
Wrapper = Callable[[Function], Function]
"""From a function to what is called in its place."""


def misfit(owner: Any, name: str, parameters: Sequence[str], *, named: Sequence[str] = ()) -> str | None:
    """Why ``owner.name`` is not the function that we know, in words; None where it is.

    ``parameters``: the names that its parameters must begin with, in order; ``named``: what it must take besides,
    wherever.  A later version may have more.
    """
    where = f"{getattr(owner, '__name__', owner)}.{name}"
    original = getattr(owner, name, None)
    if not callable(original):
        return f"there is no {where}"
    return unlike(where, tuple(inspect.signature(original).parameters), parameters, named)


def unlike(where: str, found: Sequence[str], parameters: Sequence[str], named: Sequence[str]) -> str | None:
    """The same of the function ``where``, whose parameters are ``found``."""
    if tuple(found[: len(parameters)]) != tuple(parameters):
        return f"{where} takes ({', '.join(found)}), expected ({', '.join(parameters)}, ...)"
    if missing := [one for one in named if one not in found]:
        return f"{where} takes ({', '.join(found)}), without {', '.join(missing)}"
    return None


def wrap(owner: Any, name: str, parameters: Sequence[str], wrapper: Wrapper, supported: str) -> Function:
    """Replace ``owner.name`` by ``wrapper(owner.name)`` and return the original.

    Raises UserError, with ``supported`` (which versions are), where it is another function than we know: a hook on a
    function that changed its meaning would break the invariant silently.
    """
    if reason := misfit(owner, name, parameters):
        raise UserError(f"--recover: {reason} ({supported})")
    original: Function = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(wrapper(original)))
    return original


@dataclass(frozen=True)
class Seam:
    """One function of a loop, by which it fills a role."""

    module: str
    """Where the loop looks it up: the module of the caller where it was imported by name."""
    name: str
    """In the module; of a method ``Class.method``."""
    parameters: tuple[str, ...] = ()
    """What its parameters begin with."""
    named: tuple[str, ...] = ()
    """What it must take besides, wherever."""
    adapt: Callable[[Wrapper], Wrapper] | None = None
    """Where it takes its arguments otherwise than the role: makes a wrapper of this function from one of the role."""
    optional: bool = False
    """Whether a version may lack it, or the class of a method: then nothing is wrapped."""
    formerly: str = ""
    """Of a method: its class in older versions."""

    def owner(self) -> Any:
        """The module, imported, or the class in it; None where there is none."""
        try:
            found = importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{self.module}.".startswith(f"{error.name}."):
                raise  # it is there, and lacks something itself
            return None
        if not self._class:
            return found
        return getattr(found, self._class, None) or (getattr(found, self.formerly, None) if self.formerly else None)

    @property
    def _class(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def _function(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def present(self) -> bool:
        """Whether there is such a function, or the class that must have it."""
        return (owner := self.owner()) is not None and bool(self._class or getattr(owner, self.name, None))

    def misfit(self) -> str | None:
        """Why it does not fit, in words; None where it does."""
        if (owner := self.owner()) is None:
            what = f"{self.module}.{self._class}" if self._class else f"module {self.module}"
            return None if self.optional else f"there is no {what}"
        if self.optional and not self.present:
            return None
        return misfit(owner, self._function, self.parameters, named=self.named)

    def wrap(self, wrapper: Wrapper, supported: str) -> None:
        """Have ``wrapper``, one of the role, called in its place.  Raises UserError as ``wrap`` does."""
        if self.optional and not self.present:
            return
        own = wrapper if self.adapt is None else self.adapt(wrapper)
        wrap(self.owner(), self._function, self.parameters, own, supported)


@dataclass(frozen=True)
class Role:
    """One function of a training loop."""

    name: str
    parameters: tuple[str, ...]
    """The first parameters of the wrapper."""
    when: str
    """When the loop calls it, and what it must return, where that matters."""
    required: bool = True
    """Whether a loop without it is refused."""


ROLES = (
    # ---- before the training
    Role("initialize", (), "once per model that is built: makes torch's default group, then all of Megatron-Core's"),
    Role(
        "loader",
        ("dataset", "consumed_samples"),
        "for each data set: returns a torch DataLoader with one of Megatron's batch samplers, or None without data. "
        "The loop gets an iterator of microbatches by number in its place, and hands it to the schedule unread",
    ),
    Role("endless", (), "where a loader is made to start again at its end"),
    # ---- the training
    Role(
        "train",
        ("forward_step_func", "model", "optimizer", "scheduler", "train_data", "valid_data"),
        "once, around all iterations; again where this worker was out of the training and has a place again. The "
        "iterations begin after ``args.iteration``, with ``args.num_floating_point_operations_so_far``. Where a "
        "flag or a signal asks for the end it may call ``sys.exit()`` itself; what others call is an error",
    ),
    Role(
        "train_step",
        ("forward_step_func", "data_iterator", "model", "optimizer"),
        "once per iteration, around forward, backward, finalize_model_grads and optimizer.step(); returns a tuple of "
        "losses by name, whether the update was skipped, three of the loop's own, and the gradient norm. "
        "``args.curr_iteration`` iterations are over then",
    ),
    Role(
        "schedule",
        (),
        "returns Megatron-Core's forward_backward_func; the loop calls that by keywords, in a train_step and in an "
        "evaluation (``forward_only``), with the launch's number of microbatches",
    ),
    Role(
        "log",
        ("losses", "totals", "learning_rate", "iteration"),
        "after each iteration: adds the losses to the loop's totals, and prints them",
    ),
    Role("skipped_step", (), "for an iteration that is left out: would read its data", required=False),
    # ---- beside the steps
    Role("evaluate", ("forward_step_func", "data_iterator", "model"), "a whole evaluation, between two iterations"),
    Role("evaluations", (), "around it: knows how many steps it has", required=False),
    Role("save", ("iteration",), "writes a checkpoint after ``iteration`` iterations"),
    Role("finalize_saves", (), "completes checkpoints that are written asynchronously", required=False),
    Role(
        "checkpoint_folder",
        ("checkpoints_path", "iteration", "release"),
        "within save: the name of what is written; called with ``return_base_dir`` too. An attempt gets its own folder",
    ),
    Role(
        "written",
        ("path",),
        "within save, by rank 0, when all have written: the attempt gets the checkpoint's name, and ``path`` with it",
    ),
    Role("schedule_save", ("async_request",), "within save: an asynchronous one begins", required=False),
    Role("saved", ("checkpoint_path",), "within save: tells others of the folder", required=False),
    Role(
        "random_states",
        (),
        "within save: the states of random numbers of all replicas; returns a list of them, or what holds one",
        required=False,
    ),
    Role("load", (), "before the training: reads a checkpoint; returns (iteration, operations)"),
    Role("loaders", (), "before the training: builds all loaders; asks rank 0 whether there is data"),
    Role("progress_log", ("save_dir", "string", "barrier"), "appends a line to the job's log", required=False),
    Role("throughputs", (), "the same of a checkpoint, after it has read that log", required=False),
    Role("world_size", (), "the number of workers, for that log: the launch's", required=False),
    Role("weight_hashes", ("model", "cross_check"), "compares parameters over replicas", required=False),
    Role("parameters_norm", ("model",), "adds up all parameters", required=False),
    Role("sequence_lengths", (), "adds up the lengths of packed sequences over replicas", required=False),
)
"""In the order of a run."""


INTERFACE = 1
"""The version of ``ROLES``, ``Services`` and what they promise.  It rises when a loop that fits would not fit any more;
a role or service that a loop may leave out does not raise it."""


class Services(Protocol):
    """What the recovery asks of a loop, besides wrapping it.  By the main thread of a worker.

    It reads the settings of the run by the names of Megatron's flags, from ``megatron.training.get_args()``.  A loop
    that has no such namespace sets a view of its own settings there, as ``megatron_hooks.loop.bridge`` does.

    A loop that counts the time of the run has ``running(seconds: float) -> float``, too: it makes the loop count at
    least ``seconds`` until now, and returns how many the loop counts then.
    """

    def operations(self, samples: int) -> float:
        """Floating-point operations of ``samples`` samples of the run's length: forward and backward."""

    def finish_saves(self) -> None:
        """Complete the checkpoints under way, and wait for it; with workers of all replicas, which call it, too."""

    def forget(self) -> None:
        """Drop the loop's global state: the model is to be built again, for another position."""


@dataclass(frozen=True)
class Loop:
    """One training loop.  ``seams``: for each role the functions that fill it."""

    name: str
    supported: str
    """Which versions are, in words, for messages."""
    seams: Mapping[str, Sequence[Seam]]
    services: Services
    interface: int = INTERFACE
    """The version of the interface that it was written for."""

    def misfits(self) -> list[str]:
        """Everything that does not fit, in words; empty: all seams are those that we know."""
        if self.interface != INTERFACE:
            return [f"it was written for version {self.interface} of recover_megatron.integrate, this is {INTERFACE}"]
        known = {role.name for role in ROLES}
        found = [f"there is no role {name}" for name in self.seams if name not in known]
        found += [
            f"it has nothing for {role.name}" for role in ROLES if role.required and not self.seams.get(role.name)
        ]
        return found + [reason for seams in self.seams.values() for seam in seams if (reason := seam.misfit())]

    def refusals(self) -> list[str]:
        """The same as messages, for the user."""
        return [f"--recover: {self.name}: {reason} ({self.supported})" for reason in self.misfits()]

    def check(self) -> None:
        """Raises UserError with everything that does not fit, before anything is wrapped."""
        if reasons := self.refusals():
            raise UserError(*reasons)

    def wrap(self, role: str, wrapper: Wrapper) -> None:
        """Wrap the functions that fill ``role``; none where this loop has none."""
        for seam in self.seams.get(role, ()):
            seam.wrap(wrapper, self.supported)
