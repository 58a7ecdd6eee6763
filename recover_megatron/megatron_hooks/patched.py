"""Entry points for a Megatron whose scripts accept ``--recover`` (docs/integrate.md).

    megatron/core/__init__.py         before_megatron()                  at the top: checks the version, sets the device
    megatron/training/arguments.py    parse_args = parsing(parse_args)   adds the flags of --recover; refuses flags that
                                                                         cannot run, before any process group exists
    megatron/training/training.py     pretrain = surviving(pretrain)     installs the hooks of --recover

A patch inserts these lines into Megatron's files; ``as_imported`` changes the modules of an unpatched Megatron in the
same way.  pretrain_gpt_recover.py (`program`) makes the same checks and installs the same hooks itself, so under that
script these functions do nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from recover_megatron import hostdevice
from recover_megatron.arguments import config_from_argv
from recover_megatron.errors import UserError, refuse
from recover_megatron.hostdevice import megatron_fixes
from recover_megatron.integrate import Wrapper
from recover_megatron.logger import get_logger
from recover_megatron.megatron_hooks.entry import flags
from recover_megatron.megatron_hooks.entry.program import choose_device, is_in_charge, with_checkpoint_args
from recover_megatron.megatron_hooks.monkeypatch import ENTRY, SUPPORTED, find_megatron, is_surviving
from recover_megatron.variables import JOIN_VARIABLE

log = get_logger(__name__)

SCRIPTS = (
    *("pretrain_gpt.py", "pretrain_hybrid.py", "pretrain_mamba.py", "pretrain_vlm.py", "train_rl.py"),
    *("examples/bert/pretrain_bert.py", "examples/multimodal/train.py", "examples/t5/pretrain_t5.py"),
)
"""Scripts of a Megatron-LM checkout that use Megatron's loop and were reviewed for this package."""
UNKNOWN = (
    "{} is not one of Megatron's training scripts; it is accepted because it calls Megatron's pretrain(). It must get "
    "each microbatch from the iterator of its forward step, and must not draw random numbers or keep its own "
    "counters (docs/integrate.md#make-your-code-safe-to-re-run)"
)
ANOTHER_LOOP = (
    "--recover: this script creates Megatron's process groups without Megatron's pretrain(), so its training is not "
    "protected: remove --recover. To protect your own training loop use recover_megatron.integrate; for "
    "Megatron-Bridge use loop.bridge (docs/integrate.md)"
)
GROUPS_BEFORE = (
    "--recover: this script has created process groups before it calls Megatron's pretrain(); they cannot be rebuilt "
    "after a death: let pretrain() create them, or remove --recover"
)
DROPPED = (
    "--recover was given, but this script has removed it from sys.argv, so nothing would be protected. Make the script "
    "keep --recover and the --recover-* flags in sys.argv, or remove them from the command"
)

_begun = False


def as_imported() -> None:
    """Change Megatron's modules on import as a patch changes their files; patched modules stay unchanged."""
    wrappers: dict[str, Wrapper] = {"parse_args": parsing, "pretrain": surviving}
    inserted = [
        megatron_fixes.Fix(ENTRY[name].module, functools.partial(_insert, name, wrapper), "it accepts --recover")
        for name, wrapper in wrappers.items()
    ]
    megatron_fixes.watch(*inserted, first=before_megatron)


def _insert(name: str, wrapper: Wrapper, module: ModuleType) -> None:
    if getattr(getattr(module, name, None), "is_ours", False):
        return  # a patch has already wrapped this function
    with _refusing():
        ENTRY[name].wrap(wrapper, SUPPORTED)


def before_megatron(module: str = "megatron.core") -> None:
    """Check Megatron's version and choose the device; called at the top of ``module``, Megatron's first module."""
    global _begun
    if is_in_charge() or _begun:
        return
    _begun = True
    with _refusing():
        find_megatron(brings_script=True)
        config = config_from_argv(sys.argv[1:])
        choose_device(config, within=module)
    if config.enabled:
        name = "initialize_model_parallel"
        guard = functools.partial(_insert, name, _only_within_pretrain)
        megatron_fixes.watch(megatron_fixes.Fix(ENTRY[name].module, guard, "only pretrain() is protected"))


def _only_within_pretrain(make_groups: Callable[..., None]) -> Callable[..., None]:
    def initialize_model_parallel(*given: Any, **options: Any) -> None:
        with _refusing():
            if not (is_in_charge() or is_surviving()):
                raise UserError(ANOTHER_LOOP)
        make_groups(*given, **options)

    return initialize_model_parallel


def parsing(parse_args: Callable[..., argparse.Namespace]) -> Callable[..., argparse.Namespace]:
    """Wrap Megatron's ``parse_args`` to parse the flags of --recover too, and to exit if a run with them cannot start.

    Before the exit every reason is printed.
    """

    @functools.wraps(parse_args)
    def parse_args_with_ours(
        extra_args_provider: flags.Provider | None = None, ignore_unknown_args: bool = False
    ) -> argparse.Namespace:
        if is_in_charge():
            return parse_args(extra_args_provider, ignore_unknown_args)
        with _refusing():
            _check_kept()
            config = config_from_argv(sys.argv[1:])
            provider = flags.arguments_provider(config, [extra_args_provider] if extra_args_provider else [])
            args: argparse.Namespace = flags.as_user_errors(lambda: parse_args(provider, ignore_unknown_args))
            if reasons := flags.problems(with_checkpoint_args(args), config, may_have_data=not _is_megatrons()):
                raise UserError(*reasons)
        return args

    return _marked(parse_args_with_ours)


def surviving(pretrain: Callable[..., None]) -> Callable[..., None]:
    """Wrap Megatron's ``pretrain`` so that it runs with the hooks of --recover."""

    @functools.wraps(pretrain)
    def surviving_pretrain(*given: Any, **options: Any) -> None:
        with _refusing():
            _check_kept()
        if is_in_charge() or "--recover" not in sys.argv:
            return pretrain(*given, **options)
        import torch

        with _refusing():
            if torch.distributed.is_initialized():
                raise UserError(GROUPS_BEFORE)
            if not _is_megatrons() and _speaks():
                log.warning(UNKNOWN.format(Path(sys.argv[0]).name))
            from recover_megatron.megatron_hooks.entry.fault_tolerance import survive

            call = _Call(pretrain, inspect.signature(pretrain).bind(*given, **options))
            survive(config_from_argv(sys.argv[1:]), call, call.arguments)

    return _marked(surviving_pretrain)


def _marked(function: Any) -> Any:
    function.is_ours = True
    return function


def _check_kept() -> None:
    """Raise UserError if the command line has --recover, but the script has removed it from ``sys.argv``."""
    if "--recover" in sys.orig_argv and "--recover" not in sys.argv:
        raise UserError(DROPPED)


def _is_megatrons() -> bool:
    """Return whether the main script belongs to a Megatron-LM checkout, judged by its path."""
    main = os.path.realpath(getattr(sys.modules["__main__"], "__file__", None) or "")
    return any(
        main.endswith(f"/{script}") and Path(main.removesuffix(script), "megatron", "core").is_dir()
        for script in SCRIPTS
    )


def _speaks() -> bool:
    """Return whether this worker logs messages that concern all workers of the launch."""
    return hostdevice.speaks() and JOIN_VARIABLE not in os.environ


def say_if_unprotected() -> None:
    """Log a warning if a script was started with --recover and has ended without using it."""
    asked = "--recover" in sys.orig_argv and not {"-h", "--help"} & set(sys.argv)
    if asked and "recover_megatron.membership.io.session" not in sys.modules and _speaks():
        log.warning(
            f"{Path(sys.argv[0]).name} has ended without a call of Megatron's pretrain() or of recover_megatron: "
            "--recover had no effect, and the run was not protected"
        )


class _Call:
    """The script's call of pretrain(), repeated each time this worker builds its model.

    The script parses the flags and builds a configuration before it calls pretrain(); copies of both are kept, since
    pretrain() changes them.
    """

    def __init__(self, pretrain: Callable[..., None], bound: inspect.BoundArguments) -> None:
        self._pretrain = pretrain
        self._bound = bound
        self._rank = os.environ.get("RANK")
        from megatron.training import get_args

        # One deepcopy of the arguments and the configuration, so that objects in both stay shared.
        self._kept = copy.deepcopy((get_args(), bound.arguments["cfg_container"]))

    def arguments(self) -> argparse.Namespace:
        """Return Megatron's arguments, for a worker that waits for a place before it builds its model."""
        args: argparse.Namespace = self._kept[0]
        return args

    def __call__(self) -> None:
        if os.environ["RANK"] != self._rank:
            self._configure()
        self._rank = None  # pretrain() changes the arguments, so the next call must configure them again for any rank
        self._pretrain(*self._bound.args, **self._bound.kwargs)

    def _configure(self) -> None:
        """Set Megatron's global arguments and the call's configuration for the rank in the environment."""
        from megatron.training import global_vars, training

        training.destroy_global_state()
        args, self._bound.arguments["cfg_container"] = copy.deepcopy(self._kept)
        args.rank = int(os.environ["RANK"])
        global_vars.set_global_variables(args)


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Context that prints the reasons of a UserError and exits the process, as pretrain_gpt_recover.py does."""
    try:
        yield
    except UserError as error:
        refuse(Path(sys.argv[0]).name, error.reasons)
