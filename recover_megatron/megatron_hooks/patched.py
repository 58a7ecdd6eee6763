"""What is called of a Megatron whose scripts take ``--recover`` (docs/patches.md).

    megatron/core/__init__.py         before_megatron()                  at its top: the version, the device
    megatron/training/arguments.py    parse_args = parsing(parse_args)   our flags join Megatron's; what cannot run is
                                                                         refused, before anything was started
    megatron/training/training.py     pretrain = surviving(pretrain)     the hooks are installed; deaths are survived

A patch inserts these lines into the files; ``as_imported`` does the same to the modules of an unpatched Megatron.  The
checks and hooks are those of pretrain_gpt_recover.py (`program`), under which this has nothing to do.
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
from recover_megatron.megatron_hooks.entry.program import choose_device, is_in_charge, with_those_of_checkpoint
from recover_megatron.megatron_hooks.monkeypatch import ENTRY, SUPPORTED, find_megatron, is_surviving
from recover_megatron.variables import JOIN_VARIABLE

log = get_logger(__name__)

SCRIPTS = (
    *("pretrain_gpt.py", "pretrain_hybrid.py", "pretrain_mamba.py", "pretrain_vlm.py", "train_rl.py"),
    *("examples/bert/pretrain_bert.py", "examples/multimodal/train.py", "examples/t5/pretrain_t5.py"),
)
"""Those of a checkout whose loop is Megatron's, and which have been read."""
UNKNOWN = (
    "{} is none of Megatron's own training scripts; it is taken, since it calls Megatron's pretrain(). It must get "
    "each microbatch from the iterator of its forward step, and draw and count nothing by itself "
    "(docs/patches.md#scripts-of-your-own)"
)
ANOTHER_LOOP = (
    "--recover: this script makes Megatron's process groups without Megatron's pretrain(), so whatever it does is not "
    "protected: leave --recover out. A training loop of your own is connected by recover_megatron.integrate, and "
    "Megatron-Bridge's by loop.bridge (docs/integrate.md)"
)
GROUPS_BEFORE = (
    "--recover: this script has made process groups before it calls Megatron's pretrain(), which cannot be made anew "
    "after a death: let pretrain() make them, or leave --recover out"
)
DROPPED = (
    "--recover was given, but this script has taken it out of sys.argv, by which it is known: nothing would be "
    "protected. Let the script keep it there, with the other --recover-* flags, or leave it out of the command"
)

_begun = False


def as_imported() -> None:
    """Do to Megatron's modules, as they are imported, what a patch does to their files; a patched one is left alone."""
    wrappers: dict[str, Wrapper] = {"parse_args": parsing, "pretrain": surviving}
    inserted = [
        megatron_fixes.Fix(ENTRY[name].module, functools.partial(_insert, name, wrapper), "it takes --recover")
        for name, wrapper in wrappers.items()
    ]
    megatron_fixes.watch(*inserted, first=before_megatron)


def _insert(name: str, wrapper: Wrapper, module: ModuleType) -> None:
    if getattr(getattr(module, name, None), "is_ours", False):
        return  # a patch did
    with _refusing():
        ENTRY[name].wrap(wrapper, SUPPORTED)


def before_megatron(module: str = "megatron.core") -> None:
    """At the top of ``module``, the first of Megatron's: check the version and choose the device."""
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
        megatron_fixes.watch(megatron_fixes.Fix(ENTRY[name].module, guard, "no other loop is protected"))


def _only_within_pretrain(make_groups: Callable[..., None]) -> Callable[..., None]:
    def initialize_model_parallel(*given: Any, **options: Any) -> None:
        with _refusing():
            if not (is_in_charge() or is_surviving()):
                raise UserError(ANOTHER_LOOP)
        make_groups(*given, **options)

    return initialize_model_parallel


def parsing(parse_args: Callable[..., argparse.Namespace]) -> Callable[..., argparse.Namespace]:
    """``parse_args`` of Megatron, knowing our flags too; ends a process whose flags cannot run, with all reasons."""

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
            args: argparse.Namespace = flags.in_plain_words(lambda: parse_args(provider, ignore_unknown_args))
            if reasons := flags.problems(with_those_of_checkpoint(args), config, may_have_data=not _is_megatrons()):
                raise UserError(*reasons)
        return args

    return _marked(parse_args_with_ours)


def surviving(pretrain: Callable[..., None]) -> Callable[..., None]:
    """``pretrain`` of Megatron, with the hooks of --recover."""

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
    """Raise UserError where the command had --recover, and the script's arguments have it no more."""
    if "--recover" in sys.orig_argv and "--recover" not in sys.argv:
        raise UserError(DROPPED)


def _is_megatrons() -> bool:
    """Whether what runs is a script of a Megatron-LM checkout, by where it lies."""
    main = os.path.realpath(getattr(sys.modules["__main__"], "__file__", None) or "")
    return any(
        main.endswith(f"/{its}") and Path(main.removesuffix(its), "megatron", "core").is_dir() for its in SCRIPTS
    )


def _speaks() -> bool:
    """Whether what all workers of a launch find is said by this one."""
    return hostdevice.speaks() and JOIN_VARIABLE not in os.environ


def say_if_unprotected() -> None:
    """At the end of a script with --recover: that nothing of it was used."""
    asked = "--recover" in sys.orig_argv and not {"-h", "--help"} & set(sys.argv)
    if asked and "recover_megatron.membership.io.session" not in sys.modules and _speaks():
        log.warning(
            f"{Path(sys.argv[0]).name} has ended and has called neither Megatron's pretrain() nor anything of "
            "recover_megatron: of --recover nothing was used, and it would have survived no death"
        )


class _Call:
    """The script's call of pretrain(), to be made as often as this worker builds Megatron.

    The script parses the flags and makes a configuration of them before: copies of both are kept.
    """

    def __init__(self, pretrain: Callable[..., None], bound: inspect.BoundArguments) -> None:
        self._pretrain = pretrain
        self._bound = bound
        self._rank = os.environ.get("RANK")
        from megatron.training import get_args

        # In one copy: what they share stays shared.  Megatron goes on changing the ones in use.
        self._kept = copy.deepcopy((get_args(), bound.arguments["cfg_container"]))

    def arguments(self) -> argparse.Namespace:
        """Megatron's arguments, for a worker that has to wait before it builds anything."""
        args: argparse.Namespace = self._kept[0]
        return args

    def __call__(self) -> None:
        if os.environ["RANK"] != self._rank:
            self._configure()
        self._rank = None  # whichever is wanted the next time, everything has been used
        self._pretrain(*self._bound.args, **self._bound.kwargs)

    def _configure(self) -> None:
        """Let Megatron's global arguments, and the configuration, be those of the rank that this worker has now."""
        from megatron.training import global_vars, training

        training.destroy_global_state()
        args, self._bound.arguments["cfg_container"] = copy.deepcopy(self._kept)
        args.rank = int(os.environ["RANK"])
        global_vars.set_global_variables(args)


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Tell a UserError as pretrain_gpt_recover.py does, and end the process."""
    try:
        yield
    except UserError as error:
        refuse(Path(sys.argv[0]).name, error.reasons)
