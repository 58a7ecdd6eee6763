"""Versioned interface between recovery and a training loop on megatron.core.

    Loop     description of a training loop: its seams, its services for recovery, and its interface version
    ROLES    the roles that a loop's functions fill: parameters, time of the call, and result
    Seam     a function of the loop, by module, name and parameters, checked before any function is wrapped

Recovery replaces each function that fills a role by a wrapper.  The loop calls the wrapper with the role's
``parameters`` first, by position or by name, and then any further arguments.  The wrapper calls the loop's function
with the same arguments, and returns a result of the same kind.  If a function has other parameters than its role,
``Seam.adapt`` converts the wrapper.

This package describes two loops: Megatron-LM's (``megatron_hooks.loop.megatron_lm``) and Megatron-Bridge's
(``megatron_hooks.loop.bridge``).  docs/integrate.md explains how to describe another loop, and what is guaranteed.
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
"""Function that receives a function of the loop and returns its replacement."""


def misfit(owner: Any, name: str, parameters: Sequence[str], *, named: Sequence[str] = ()) -> str | None:
    """Return a text that explains why ``owner.name`` is not as expected; None if it has the expected parameters.

    ``parameters``: the names with which its parameter list must begin, in order; ``named``: names that the list must
    contain at any place.  Additional parameters, as in a later version, are accepted.
    """
    where = f"{getattr(owner, '__name__', owner)}.{name}"
    original = getattr(owner, name, None)
    if not callable(original):
        return f"{where} does not exist"
    return unlike(where, tuple(inspect.signature(original).parameters), parameters, named)


def unlike(where: str, found: Sequence[str], parameters: Sequence[str], named: Sequence[str]) -> str | None:
    """Return why the parameter list ``found`` of the function ``where`` is not as expected; see ``misfit``."""
    if tuple(found[: len(parameters)]) != tuple(parameters):
        return f"{where} takes ({', '.join(found)}), expected ({', '.join(parameters)}, ...)"
    if missing := [one for one in named if one not in found]:
        return f"{where} takes ({', '.join(found)}), without {', '.join(missing)}"
    return None


def wrap(owner: Any, name: str, parameters: Sequence[str], wrapper: Wrapper, supported: str) -> Function:
    """Replace ``owner.name`` by ``wrapper(owner.name)`` and return the original.

    Raises UserError if the function does not have the expected ``parameters``.  Its meaning may then have changed, so
    wrapping it could break the invariant silently.  ``supported``: names of the supported versions, for the error.
    """
    if reason := misfit(owner, name, parameters):
        raise UserError(f"--recover: {reason} ({supported})")
    original: Function = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(wrapper(original)))
    return original


@dataclass(frozen=True)
class Seam:
    """Function with which a loop fills a role."""

    module: str
    """Module in which the loop looks the function up: the calling module, if it imports the function by name."""
    name: str
    """Name of the function in the module; ``Class.method`` for a method."""
    parameters: tuple[str, ...] = ()
    """Names with which the function's parameter list must begin."""
    named: tuple[str, ...] = ()
    """Further parameters that the function must have, at any place."""
    adapt: Callable[[Wrapper], Wrapper] | None = None
    """Function that converts a wrapper for the role's parameters into one for this function; None if none is needed."""
    optional: bool = False
    """True if some supported versions lack the function (of a method: its class); nothing is wrapped in them."""
    formerly: str = ""
    """Name that the method's class has in older versions; empty if the class has the same name there."""

    def owner(self) -> Any:
        """Import the module; return it, or a method's class.  Return None if the module or class does not exist."""
        try:
            found = importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{self.module}.".startswith(f"{error.name}."):
                raise  # the module exists, but imports a missing module
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
        """Return a text that explains why the function is missing or has unexpected parameters.

        Returns None if the function has the expected parameters, or is optional and not ``present``.
        """
        if (owner := self.owner()) is None:
            what = f"{self.module}.{self._class}" if self._class else f"module {self.module}"
            return None if self.optional else f"{what} does not exist"
        if self.optional and not self.present:
            return None
        return misfit(owner, self._function, self.parameters, named=self.named)

    def wrap(self, wrapper: Wrapper, supported: str) -> None:
        """Replace the function by its wrapper; do nothing if it is optional and not ``present``.

        ``wrapper`` accepts the role's parameters.  Raises UserError if the function has unexpected parameters;
        ``supported``: names of the supported versions, for the error.
        """
        if self.optional and not self.present:
            return
        own = wrapper if self.adapt is None else self.adapt(wrapper)
        wrap(self.owner(), self._function, self.parameters, own, supported)


@dataclass(frozen=True)
class Role:
    """Role of a function of a training loop; recovery wraps the functions that fill roles."""

    name: str
    parameters: tuple[str, ...]
    """Names of the first parameters of the wrapper; ``Seam.adapt`` is needed for a function with other parameters."""
    when: str
    """Text for the docs: when the loop calls the function, and what the function returns, if anything."""
    required: bool = True
    """True if recovery refuses a loop without a function for this role."""


ROLES = (
    # ---- before the training
    Role("initialize", (), "before each build of a model: creates torch's default group and all Megatron-Core groups"),
    Role(
        "loader",
        ("dataset", "consumed_samples"),
        "for each data set: returns a torch DataLoader with one of Megatron's batch samplers, or None if there is no "
        "data. Recovery gives the loop an iterator instead, which the loop passes to the schedule without reading it",
    ),
    Role("endless", (), "repeats the data of a loader without end"),
    # ---- the training
    Role(
        "train",
        ("forward_step_func", "model", "optimizer", "scheduler", "train_data", "valid_data"),
        "once, for all iterations; again if this worker has lost its place and gets another one. The first iteration "
        "is ``args.iteration`` + 1; the FLOPs before it are ``args.num_floating_point_operations_so_far``. The loop "
        "may call ``sys.exit()`` if a flag or a signal asks it to stop; any other call of ``sys.exit()`` is an error",
    ),
    Role(
        "train_step",
        ("forward_step_func", "data_iterator", "model", "optimizer"),
        "once per iteration: runs forward, backward, finalize_model_grads and optimizer.step(); returns a tuple of "
        "the losses by name, whether the update was skipped, three values for the loop only, and the gradient norm. "
        "``args.curr_iteration`` is the number of iterations before this one",
    ),
    Role(
        "schedule",
        (),
        "in a train_step, and in an evaluation with ``forward_only``: returns Megatron-Core's forward_backward_func, "
        "which the loop calls with keyword arguments and with the number of microbatches at launch",
    ),
    Role(
        "log",
        ("losses", "totals", "learning_rate", "iteration"),
        "after each iteration: adds the losses to the loop's totals, and prints them",
    ),
    Role("skipped_step", (), "for a skipped iteration: reads the data of the iteration", required=False),
    # ---- outside of steps
    Role("evaluate", ("forward_step_func", "data_iterator", "model"), "a complete evaluation, between two iterations"),
    Role("evaluations", (), "around ``evaluate``: sets the number of evaluation steps", required=False),
    Role("save", ("iteration",), "writes a checkpoint after ``iteration`` iterations"),
    Role("finalize_saves", (), "completes checkpoints that are written asynchronously", required=False),
    Role(
        "checkpoint_folder",
        ("checkpoints_path", "iteration", "release"),
        "within save: returns the checkpoint's folder, also with ``return_base_dir``; a new one in each save attempt",
    ),
    Role(
        "written",
        ("path",),
        "within save, by rank 0, after all ranks have written: recovery then gives the folder its final name",
    ),
    Role("schedule_save", ("async_request",), "within save: begins an asynchronous save", required=False),
    Role("saved", ("checkpoint_path",), "within save: reports the folder to other programs", required=False),
    Role(
        "random_states",
        (),
        "within save: returns a list of the random number states of all replicas, or an object that contains the list",
        required=False,
    ),
    Role("load", (), "before the training: reads a checkpoint; returns its iteration, and the FLOPs until then"),
    Role("loaders", (), "before the training: builds all loaders; asks rank 0 whether there is data"),
    Role("progress_log", ("save_dir", "string", "barrier"), "appends a line to the job's log", required=False),
    Role("throughputs", (), "after a checkpoint: reads the job's log, and appends a line", required=False),
    Role("world_size", (), "returns the number of workers at launch, for ``progress_log``", required=False),
    Role("weight_hashes", ("model", "cross_check"), "compares parameters over replicas", required=False),
    Role("parameters_norm", ("model",), "computes the norm of all parameters", required=False),
    Role("sequence_lengths", (), "adds up the lengths of packed sequences over replicas", required=False),
)
"""All roles, grouped by the part of a run in which the loop calls their functions."""


INTERFACE = 1
"""Version of this interface: of ``ROLES`` and ``Services``.  It increases if a change breaks existing loops; a new role
or service that a loop may omit does not increase it."""


class Services(Protocol):
    """Functions that a loop provides for recovery, in addition to its seams.  Each worker's main thread calls them.

    Recovery reads the settings of the run from ``megatron.training.get_args()``, by the names of Megatron's flags.  A
    loop that has no such namespace must set one with its settings, as ``megatron_hooks.loop.bridge`` does.

    A loop that measures the duration of the run also provides ``running(seconds: float) -> float``, which raises the
    measured duration to at least ``seconds``, and returns it.
    """

    def operations(self, samples: int) -> float:
        """Return the floating-point operations (forward and backward) for ``samples`` samples of full length."""

    def finish_saves(self) -> None:
        """Complete the pending asynchronous checkpoints before returning.

        The workers of all replicas call this together.
        """

    def forget(self) -> None:
        """Drop the loop's global state; called before this worker builds another model, for another position."""


@dataclass(frozen=True)
class Loop:
    """Description of a training loop.  ``seams``: role's name -> the functions that fill the role."""

    name: str
    supported: str
    """Supported versions of the loop, as text for messages."""
    seams: Mapping[str, Sequence[Seam]]
    services: Services
    interface: int = INTERFACE
    """Version of the interface for which this description was written."""

    def misfits(self) -> list[str]:
        """Return all reasons why recovery cannot work with the installed loop; an empty list if it can."""
        if self.interface != INTERFACE:
            return [f"it needs version {self.interface} of recover_megatron.integrate, this is version {INTERFACE}"]
        known = {role.name for role in ROLES}
        found = [f"role {name} does not exist" for name in self.seams if name not in known]
        found += [
            f"it has no seam for role {role.name}" for role in ROLES if role.required and not self.seams.get(role.name)
        ]
        return found + [reason for seams in self.seams.values() for seam in seams if (reason := seam.misfit())]

    def refusals(self) -> list[str]:
        """Return all reasons why recovery cannot work with the installed loop, as messages for the user."""
        return [f"--recover: {self.name}: {reason} ({self.supported})" for reason in self.misfits()]

    def check(self) -> None:
        """Raise UserError if recovery cannot work with the installed loop; call this before any function is wrapped."""
        if reasons := self.refusals():
            raise UserError(*reasons)

    def wrap(self, role: str, wrapper: Wrapper) -> None:
        """Wrap all functions that fill ``role``; do nothing if this loop has none."""
        for seam in self.seams.get(role, ()):
            seam.wrap(wrapper, self.supported)
