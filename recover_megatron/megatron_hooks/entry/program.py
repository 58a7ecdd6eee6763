"""The training program: Megatron's pretrain(), with the functions of a GPT script.

    load        finds Megatron, chooses the device, and imports all modules
    check       parses the flags, and refuses flags that cannot run, before any process group is created
    run         installs the hooks with --recover, and calls pretrain()

If Megatron is a checkout, the program uses the functions of the checkout's pretrain_gpt.py.  The wheel of 0.19 has
no such script, so `gpt_script` replaces it.  Megatron's pretrain() has a parameter for the model provider only in 0.18.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import importlib
import io
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import Any

from recover_megatron import hostdevice
from recover_megatron import program as code
from recover_megatron.arguments import RecoverConfig, config_from_argv
from recover_megatron.errors import EXIT_OWN_FAULT, UserError, traceback_wanted
from recover_megatron.hostdevice import megatron_fixes
from recover_megatron.logger import get_logger
from recover_megatron.megatron_hooks.entry import flags
from recover_megatron.megatron_hooks.monkeypatch import SCRIPT, Megatron, find_megatron, wrap
from recover_megatron.network import fork_server, handover

log = get_logger(__name__)

DEFAULTS = {"tokenizer_type": "GPT2BPETokenizer"}
"""Argument defaults of Megatron's GPT script."""


@dataclass(frozen=True)
class Program:
    """A loaded Megatron and its training script."""

    megatron: Megatron
    script: ModuleType
    config: RecoverConfig
    loaded_at: float
    """Time in seconds since 1970 from which Megatron's log measures the start-up: when loading began, or when a
    prepared process became a worker."""

    @property
    def _options(self) -> flags.Provider:
        """Return the provider that adds the flags of --recover and of the script to Megatron's parser."""
        others = [self.script.add_modelopt_args] if getattr(self.script, "has_nvidia_modelopt", False) else []
        return flags.arguments_provider(self.config, others)

    def check(self) -> None:
        """Parse ``sys.argv`` as Megatron will; raises UserError with every reason why the run cannot start."""
        args = with_checkpoint_args(self._parsed)
        if reasons := flags.problems(args, self.config):
            raise UserError(*reasons)
        hostdevice.warn_of_what_is_never_summed(args)
        validated(args)

    @cached_property
    def _parsed(self) -> argparse.Namespace:
        """Megatron's arguments, parsed as Megatron will parse them, but not validated yet; nobody changes them."""
        from megatron.training import arguments

        parsed: argparse.Namespace = flags.as_user_errors(partial(arguments.parse_args, self._options))
        return parsed

    def run(self) -> None:
        """Train to the end.  Raises UserError for problems that are found only when Megatron is initialized."""
        from megatron.training import inprocess_restart, print_rank_0, set_startup_timestamps, training

        _print_versions(self.megatron, print_rank_0)
        set_startup_timestamps(program_start=self.loaded_at, main_entry=time.time())
        self.script.train_valid_test_datasets_provider.is_distributed = True
        if self.config.enabled:
            from recover_megatron.megatron_hooks.entry.fault_tolerance import survive

            survive(
                self.config,
                lambda: self._pretrain(training.pretrain),
                lambda: validated(with_checkpoint_args(self._parsed)),
            )
            return
        pretrain, store = inprocess_restart.maybe_wrap_for_inprocess_restart(training.pretrain)
        self._pretrain(pretrain, store=store)

    def _pretrain(self, pretrain: Callable[..., None], **options: Any) -> None:
        """Call pretrain(); raises UserError if a missing Python package stops it before the training."""
        try:
            self._call(pretrain, **options)
        except ImportError as error:
            at = traceback.extract_tb(error.__traceback__)
            if any(frame.name in ("train", "evaluate") for frame in at) or traceback_wanted():
                raise
            words = " ".join(str(error).split())
            raise UserError(
                f"Megatron lacks a Python package for these flags: {words} "
                f"({sys.executable}; RECOVER_TRACEBACK=1 shows the traceback)"
            ) from None

    def _call(self, pretrain: Callable[..., None], **options: Any) -> None:
        """Call pretrain() with the parameters that this version of Megatron expects."""
        from megatron.core.enums import ModelType
        from megatron.training.argument_utils import pretrain_cfg_container_from_args
        from megatron.training.arguments import parse_and_validate_args

        script = self.script
        args = flags.as_user_errors(partial(parse_and_validate_args, self._options, args_defaults=dict(DEFAULTS)))
        if self.megatron.release < (0, 19):  # the script builds the model
            container = pretrain_cfg_container_from_args(args)
            options["model_provider"] = partial(script.model_provider, script.gpt_builder)
        else:  # the configuration builds the model
            container = pretrain_cfg_container_from_args(args, self._model_config(args))
        pretrain(
            container,
            script.train_valid_test_datasets_provider,
            model_type=ModelType.encoder_or_decoder,
            forward_step_func=script.forward_step,
            get_embedding_ranks=script.get_embedding_ranks,
            **options,
        )

    def _model_config(self, args: argparse.Namespace) -> Any:
        """Return the model's configuration; with ModelOpt (only in a checkout) an instance of ModelOpt's class."""
        from megatron.training.argument_utils import gpt_config_from_args

        if getattr(self.script, "has_nvidia_modelopt", False):
            self.script.maybe_enable_modelopt(args)
            if getattr(args, "modelopt_enabled", False):
                return gpt_config_from_args(args, model_config_cls=self.script.ModelOptModelConfig)
        return gpt_config_from_args(args)


def validated(args: argparse.Namespace) -> argparse.Namespace:
    """Return a copy of the parsed arguments ``args`` that Megatron has validated; with ``--yaml-cfg`` return ``args``.

    Megatron's output is dropped, because pretrain() validates and prints again.
    """
    from megatron.training import arguments

    if getattr(args, "yaml_cfg", None) is not None:
        return args
    found = copy.deepcopy(args)
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        flags.as_user_errors(partial(arguments.validate_args, found, dict(DEFAULTS)))
    return found


def with_checkpoint_args(args: argparse.Namespace) -> argparse.Namespace:
    """Return a copy of the parsed ``args`` with the values that --use-checkpoint-args reads from a checkpoint.

    Without that flag return ``args``.  Megatron's output is dropped, because Megatron reads the values again before it
    validates.  Raises UserError if no checkpoint is given, or if Megatron refuses it or exits.
    """
    if not getattr(args, "use_checkpoint_args", False):
        return args
    from megatron.training.checkpointing import load_args_from_checkpoint

    if args.load is None and getattr(args, "pretrained_checkpoint", None) is None:
        raise UserError("--use-checkpoint-args needs a checkpoint: give --load FOLDER, or --pretrained-checkpoint")
    said, found = io.StringIO(), copy.deepcopy(args)
    try:
        with contextlib.redirect_stdout(said), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for folder in ("pretrained_checkpoint", "load"):
                flags.as_user_errors(partial(load_args_from_checkpoint, found, load_arg=folder))
    except SystemExit:
        raise UserError(f"--use-checkpoint-args: Megatron would exit: {' '.join(said.getvalue().split())}") from None
    return found


def load(config: RecoverConfig) -> Program:
    """Find Megatron, choose the device, and import all modules of a run.

    The process may fork afterwards, because loading starts no thread and opens no device and no connection.  A prepared
    process then waits until it becomes a worker.  Raises UserError if Megatron is missing or unsupported, or if the
    device is missing.
    """
    global _in_charge
    _in_charge = True
    loaded_at = time.time()
    megatron = find_megatron()
    if os.environ.get("RANK", "0") != "0":
        _hide_warnings()
    collects = gc.isenabled()
    gc.disable()  # the imports leave little garbage; to search for it would take a fifth of their time
    try:
        choose_device(config)
        program = Program(megatron, _import_all(megatron), config, loaded_at)
        if config.enabled:
            wrap("ArgumentGroupFactory._get_field_docstrings", _read_once)
    finally:
        if collects:
            gc.enable()
    gc.freeze()  # what the modules hold lives until the end: no collection during the training has to examine it
    return _activated(program) if handover.is_prepared() else program


def _activated(program: Program) -> Program:
    """Wait until this prepared process becomes a worker; return ``program`` with the values of that worker.

    A fork server never returns, but the processes that it forks do.  Exits if the imports have opened a CUDA
    device, because the waiting process would hold some of its memory.
    """
    import torch

    if program.config.enabled:
        importlib.import_module("recover_megatron.megatron_hooks.entry.fault_tolerance")
        code.remember()
    if fork_server.is_server():
        fork_server.serve()
    elif not handover.is_given():
        if torch.cuda.is_initialized() and not hostdevice.is_active():
            log.error("an imported module has opened a CUDA device, which this prepared process must not hold")
            os._exit(EXIT_OWN_FAULT)
        log.info(
            f"process {os.getpid()} is prepared to replace the next worker that dies: it has imported Megatron, and "
            "waits without a device (recover-run --prepared-workers 0: no such process)"
        )
    handover.wait()
    if os.environ.get("RANK", "0") != "0":
        _hide_warnings()
    return replace(program, config=config_from_argv(sys.argv[1:]), loaded_at=time.time())


def _hide_warnings() -> None:
    """Hide warnings that only rank 0 prints, as in Megatron's script."""
    warnings.filterwarnings("ignore", category=UserWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)


_in_charge = False


def is_in_charge() -> bool:
    """Return whether this process trains through ``load`` and ``Program.run``; `patched` then does nothing."""
    return _in_charge


def choose_device(config: RecoverConfig, within: str | None = None) -> None:
    """Make Megatron run on a GPU or on the host; call this function before Megatron is imported.

    A process that a worker spawns, such as Megatron's checkpoint writer, must call it, too.  ``within``: see
    ``hostdevice.activate``.  Raises UserError if the device is missing.
    """
    try:
        if hostdevice.wanted(config.device):
            hostdevice.activate(within)
            return
    except hostdevice.HostDeviceError as error:
        raise UserError(str(error)) from None
    megatron_fixes.install(only=["prebuilt-helpers"])


def _import_all(megatron: Megatron) -> ModuleType:
    """Import and return the script, and import modules that torch and Megatron would import during the training."""
    name = SCRIPT if megatron.has_script else "recover_megatron.megatron_hooks.entry.gpt_script"
    late = ("torch._dynamo", "megatron.training.training", "megatron.training.checkpointing")
    try:
        script = importlib.import_module(name)
        for module in late:
            importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UserError(
            f"Megatron {megatron.version} in {megatron.root} needs the Python package {error.name!r}, which is not "
            f"installed for {sys.executable}: install the requirements of that Megatron (see its pyproject.toml)"
        ) from error
    except (RuntimeError, OSError) as error:  # Megatron ignores only an ImportError of Transformer Engine
        named = (Path(frame.filename).parts for frame in traceback.extract_tb(error.__traceback__))
        if traceback_wanted() or not any("transformer_engine" in parts for parts in named):
            raise
        raise UserError(
            "Transformer Engine is installed but cannot be imported, so Megatron cannot be imported either: "
            f"{' '.join(str(error).split())} Install transformer-engine[pytorch] and the CUDA libraries that it needs "
            f"for {sys.executable}, or remove it: pip uninstall transformer-engine (RECOVER_TRACEBACK=1 shows the "
            "traceback)"
        ) from None
    return script


def _read_once(read: Callable[[Any, type], dict[str, str]]) -> Callable[[Any, type], dict[str, str]]:
    """Wrap Megatron's reader of its flags' help, which parses the source of a dataclass, to read each dataclass once.

    Each pretrain() makes two parsers, also when a spare takes a place.
    """
    known: dict[type, dict[str, str]] = {}

    def read_once(self: Any, dataclass: type) -> dict[str, str]:
        if dataclass not in known:
            known[dataclass] = read(self, dataclass)
        return known[dataclass]

    return read_once


def _print_versions(megatron: Megatron, say: Callable[[str], None]) -> None:
    import torch

    source = f"checkout {megatron.root}" if megatron.has_script else "wheel"
    say(f"> PyTorch {torch.__version__}, Megatron-Core {megatron.version} ({source}), Python {sys.version.split()[0]}")
