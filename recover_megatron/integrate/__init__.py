"""Versioned interface between recovery and a training loop on megatron.core: what a loop must offer.

    Loop     the seams of one training loop, its services for recovery, and its interface version
    ROLES    for each seam: when the loop calls it, with which arguments, its result
    Seam     a function of the loop, by module, name and parameters, checked before anything is wrapped

Each role is one function of the loop.  Its wrapper is called in place of the loop's function, with the role's
``parameters`` first, by position or by name, and any further arguments of the loop; it calls the loop's function with
the same arguments, and returns its result.  ``Seam.adapt`` translates for a function with other arguments.

The loops that come with this package are Megatron-LM's (``megatron_hooks.loop.megatron_lm``) and Megatron-Bridge's
(``megatron_hooks.loop.bridge``).  docs/integrate.md describes how to write another one, and the guarantees.
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
"""Maps a function to its replacement."""


def misfit(owner: Any, name: str, parameters: Sequence[str], *, named: Sequence[str] = ()) -> str | None:
    """Return why ``owner.name`` does not have the expected signature, as text; None if the signature fits.

    ``parameters``: the names with which its parameter list must begin, in order; ``named``: further parameters that the
    list must contain at any place.  More parameters, as a later version may have, are no misfit.
    """
    where = f"{getattr(owner, '__name__', owner)}.{name}"
    original = getattr(owner, name, None)
    if not callable(original):
        return f"{where} does not exist"
    return unlike(where, tuple(inspect.signature(original).parameters), parameters, named)


def unlike(where: str, found: Sequence[str], parameters: Sequence[str], named: Sequence[str]) -> str | None:
    """Return why a function with the parameters ``found`` does not fit, as ``misfit`` does; ``where``: its name."""
    if tuple(found[: len(parameters)]) != tuple(parameters):
        return f"{where} takes ({', '.join(found)}), expected ({', '.join(parameters)}, ...)"
    if missing := [one for one in named if one not in found]:
        return f"{where} takes ({', '.join(found)}), without {', '.join(missing)}"
    return None


def wrap(owner: Any, name: str, parameters: Sequence[str], wrapper: Wrapper, supported: str) -> Function:
    """Replace ``owner.name`` by ``wrapper(owner.name)`` and return the original.

    Raises UserError, with ``supported`` (the supported versions), if the signature is not the expected one: then the
    meaning of the function may have changed, and a hook on it would break the invariant silently.
    """
    if reason := misfit(owner, name, parameters):
        raise UserError(f"--recover: {reason} ({supported})")
    original: Function = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(wrapper(original)))
    return original


@dataclass(frozen=True)
class Seam:
    """Function of a loop that fills a role."""

    module: str
    """Module in which the loop looks the function up: the caller's module if that imports the function by name."""
    name: str
    """Name of the function in the module; ``Class.method`` for a method."""
    parameters: tuple[str, ...] = ()
    """Names with which the function's parameter list must begin."""
    named: tuple[str, ...] = ()
    """Further parameters that the function must have, at any place."""
    adapt: Callable[[Wrapper], Wrapper] | None = None
    """Turns a wrapper of the role into a wrapper of this function, if its arguments differ from the role's."""
    optional: bool = False
    """True if some supported versions lack the function, or its class; nothing is wrapped in such a version."""
    formerly: str = ""
    """Name of the method's class in older versions; empty if it is unchanged."""

    def owner(self) -> Any:
        """Import the module. Return it, or for a method the class; None if the module or the class does not exist."""
        try:
            found = importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{self.module}.".startswith(f"{error.name}."):
                raise  # it exists, and one of its own imports is missing
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
        """True if the function exists; for a method, true if its class exists."""
        return (owner := self.owner()) is not None and bool(self._class or getattr(owner, self.name, None))

    def misfit(self) -> str | None:
        """Return why the function does not fit, as text; None if it fits, or is optional and does not exist."""
        if (owner := self.owner()) is None:
            what = f"{self.module}.{self._class}" if self._class else f"module {self.module}"
            return None if self.optional else f"{what} does not exist"
        if self.optional and not self.present:
            return None
        return misfit(owner, self._function, self.parameters, named=self.named)

    def wrap(self, wrapper: Wrapper, supported: str) -> None:
        """Replace the function by ``wrapper``, a wrapper of the role.  Raises UserError as ``wrap`` does."""
        if self.optional and not self.present:
            return
        own = wrapper if self.adapt is None else self.adapt(wrapper)
        wrap(self.owner(), self._function, self.parameters, own, supported)


@dataclass(frozen=True)
class Role:
    """Function of a training loop that recovery wraps."""

    name: str
    parameters: tuple[str, ...]
    """The first parameters of the wrapper."""
    when: str
    """When the loop calls the function, and the result that the function must return, if any."""
    required: bool = True
    """True if a loop without this role is refused."""


ROLES = (
    # ---- before the training
    Role("initialize", (), "once per model that is built: creates torch's default group and all Megatron-Core groups"),
    Role(
        "loader",
        ("dataset", "consumed_samples"),
        "for each data set: returns a torch DataLoader with one of Megatron's batch samplers, or None without data. "
        "The loop gets an iterator of microbatches by number in its place, and hands it to the schedule unread",
    ),
    Role("endless", (), "makes a loader start again at its end"),
    # ---- the training
    Role(
        "train",
        ("forward_step_func", "model", "optimizer", "scheduler", "train_data", "valid_data"),
        "once, around all iterations; again after this worker was out of the training and got a place again. The "
        "iterations begin after ``args.iteration``, with ``args.num_floating_point_operations_so_far``. If a flag or "
        "a signal asks for the end, it may call ``sys.exit()`` itself; a call from elsewhere is an error",
    ),
    Role(
        "train_step",
        ("forward_step_func", "data_iterator", "model", "optimizer"),
        "once per iteration, around forward, backward, finalize_model_grads and optimizer.step(); returns a tuple of "
        "losses by name, whether the update was skipped, three values of the loop, and the gradient norm. "
        "``args.curr_iteration`` iterations are over by then",
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
    Role("skipped_step", (), "for a skipped iteration: would read its data", required=False),
    # ---- outside of steps
    Role("evaluate", ("forward_step_func", "data_iterator", "model"), "a complete evaluation, between two iterations"),
    Role("evaluations", (), "around ``evaluate``: knows the number of its steps", required=False),
    Role("save", ("iteration",), "writes a checkpoint after ``iteration`` iterations"),
    Role("finalize_saves", (), "completes checkpoints that are written asynchronously", required=False),
    Role(
        "checkpoint_folder",
        ("checkpoints_path", "iteration", "release"),
        "within save: the checkpoint's folder; called with ``return_base_dir`` too. Each attempt gets its own folder",
    ),
    Role(
        "written",
        ("path",),
        "within save, by rank 0, once all have written: the attempt gets the checkpoint's name, as does ``path``",
    ),
    Role("schedule_save", ("async_request",), "within save: begins an asynchronous save", required=False),
    Role("saved", ("checkpoint_path",), "within save: reports the folder to others", required=False),
    Role(
        "random_states",
        (),
        "within save: the random number states of all replicas; returns a list of them, or an object that holds one",
        required=False,
    ),
    Role("load", (), "before the training: reads a checkpoint; returns (iteration, operations)"),
    Role("loaders", (), "before the training: builds all loaders; asks rank 0 whether there is data"),
    Role("progress_log", ("save_dir", "string", "barrier"), "appends a line to the job's log", required=False),
    Role("throughputs", (), "``progress_log`` for a checkpoint: reads that log, then appends", required=False),
    Role("world_size", (), "the number of workers at launch, for ``progress_log``", required=False),
    Role("weight_hashes", ("model", "cross_check"), "compares parameters over replicas", required=False),
    Role("parameters_norm", ("model",), "adds up all parameters", required=False),
    Role("sequence_lengths", (), "adds up the lengths of packed sequences over replicas", required=False),
)
"""All roles, in the order of a run."""


INTERFACE = 1
"""The version of ``ROLES``, ``Services`` and their contracts.  It increases when a loop that fitted no longer
fits; a new role or service that a loop may omit does not increase it."""


class Services(Protocol):
    """Functions that a loop offers to the recovery, in addition to its seams.  A worker's main thread calls them.

    Recovery reads the settings of the run by the names of Megatron's flags, from ``megatron.training.get_args()``.  A
    loop without such a namespace sets a view of its own settings there, as ``megatron_hooks.loop.bridge`` does.

    A loop that counts the time of the run also has ``running(seconds: float) -> float``: it raises the loop's count to
    at least ``seconds``, and returns the count.
    """

    def operations(self, samples: int) -> float:
        """Return the number of floating-point operations, forward and backward, of ``samples`` full-length samples."""

    def finish_saves(self) -> None:
        """Complete the pending checkpoints and wait for them; the workers of all replicas call this together."""

    def forget(self) -> None:
        """Drop the loop's global state, because the model will be built again, for another position."""


@dataclass(frozen=True)
class Loop:
    """A training loop.  ``seams``: for each role the functions that fill it."""

    name: str
    supported: str
    """Supported versions, as text for messages."""
    seams: Mapping[str, Sequence[Seam]]
    services: Services
    interface: int = INTERFACE
    """Version of the interface for which the loop was written."""

    def misfits(self) -> list[str]:
        """Return all reasons why this loop does not fit, as texts; empty if all seams have the expected signatures."""
        if self.interface != INTERFACE:
            return [f"it needs version {self.interface} of recover_megatron.integrate, this is version {INTERFACE}"]
        known = {role.name for role in ROLES}
        found = [f"role {name} does not exist" for name in self.seams if name not in known]
        found += [
            f"it has no seam for role {role.name}" for role in ROLES if role.required and not self.seams.get(role.name)
        ]
        return found + [reason for seams in self.seams.values() for seam in seams if (reason := seam.misfit())]

    def refusals(self) -> list[str]:
        """Return the texts of ``misfits`` as messages for the user."""
        return [f"--recover: {self.name}: {reason} ({self.supported})" for reason in self.misfits()]

    def check(self) -> None:
        """Raise UserError with everything that does not fit, before anything is wrapped."""
        if reasons := self.refusals():
            raise UserError(*reasons)

    def wrap(self, role: str, wrapper: Wrapper) -> None:
        """Wrap the functions that fill ``role``; does nothing if this loop has none."""
        for seam in self.seams.get(role, ()):
            seam.wrap(wrapper, self.supported)
