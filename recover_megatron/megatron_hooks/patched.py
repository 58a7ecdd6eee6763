"""What a patched Megatron calls (docs/patches.md), in a process with ``--recover`` among its arguments.

    megatron/core/__init__.py         before_megatron()                  at its top: the version, the device
    megatron/training/arguments.py    parse_args = parsing(parse_args)   our flags join Megatron's; what cannot run is
                                                                         refused, before anything was started
    megatron/training/training.py     pretrain = surviving(pretrain)     the hooks are installed; deaths are survived

The checks and hooks are those of pretrain_gpt_recover.py (`program`), under which a patched Megatron does nothing of
its own.
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
from typing import Any

from recover_megatron.arguments import config_from_argv
from recover_megatron.errors import UserError, refuse
from recover_megatron.megatron_hooks.entry import flags
from recover_megatron.megatron_hooks.entry.program import choose_device, is_in_charge, with_those_of_checkpoint
from recover_megatron.megatron_hooks.monkeypatch import find_megatron


def before_megatron() -> None:
    """At the top of ``megatron.core``: check the version and choose the device, while nothing is imported yet."""
    if is_in_charge():
        return
    with _refusing():
        find_megatron(brings_script=True)
        choose_device(config_from_argv(sys.argv[1:]), within="megatron.core")


def parsing(parse_args: Callable[..., argparse.Namespace]) -> Callable[..., argparse.Namespace]:
    """``parse_args`` of Megatron, knowing our flags too; ends a process whose flags cannot run, with all reasons."""

    @functools.wraps(parse_args)
    def parse_args_with_ours(
        extra_args_provider: flags.Provider | None = None, ignore_unknown_args: bool = False
    ) -> argparse.Namespace:
        if is_in_charge():
            return parse_args(extra_args_provider, ignore_unknown_args)
        with _refusing():
            config = config_from_argv(sys.argv[1:])
            provider = flags.arguments_provider(config, [extra_args_provider] if extra_args_provider else [])
            args: argparse.Namespace = flags.in_plain_words(lambda: parse_args(provider, ignore_unknown_args))
            if reasons := flags.problems(with_those_of_checkpoint(args), config):
                raise UserError(*reasons)
        return args

    return parse_args_with_ours


def surviving(pretrain: Callable[..., None]) -> Callable[..., None]:
    """``pretrain`` of Megatron, with the hooks of --recover."""

    @functools.wraps(pretrain)
    def surviving_pretrain(*given: Any, **options: Any) -> None:
        if is_in_charge():
            return pretrain(*given, **options)
        from recover_megatron.megatron_hooks.entry.fault_tolerance import survive

        with _refusing():
            call = _Call(pretrain, inspect.signature(pretrain).bind(*given, **options))
            survive(config_from_argv(sys.argv[1:]), call, call.arguments)

    return surviving_pretrain


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
