"""Checks of all flags before any process group is created; all refusals are reported together, each with its remedy.

The checks find errors that Megatron would report late (missing data), unclearly (world size) or not at all (flags with
which recovery would not be exact).  Errors that Megatron itself raises are reported in the same form
(``as_user_errors``).
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import functools
import importlib.metadata
import importlib.util
import math
import os
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import arbitrary_address  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any, NoReturn

from recover_megatron import arguments, hostdevice
from recover_megatron.arguments import RecoverConfig, add_recover_arguments
from recover_megatron.chaos.spec import parse_spec
from recover_megatron.errors import UserError, traceback_wanted
from recover_megatron.log_writer import why_not_used
from recover_megatron.logger import get_logger
from recover_megatron.megatron_hooks.entry.refused import (
    EMERGING,
    adjust,
    cannot_grow,
    cannot_recover,
    cannot_shard,
    cannot_use_nccl,
    refuse_unadjusted,
    say,
)
from recover_megatron.megatron_hooks.fsdp.fsdp_refused import cannot_shard_model
from recover_megatron.megatron_hooks.layout import batches_to_come, inner_ranks_of, misfits

Provider = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]

log = get_logger(__name__)


# ---- parsing -----------------------------------------------------------------------------------------------------


def arguments_provider(config: RecoverConfig, others: Sequence[Provider] = ()) -> Provider:
    """Return an ``extra_args_provider`` for Megatron's parser, which adds the flags of --recover and of ``others``.

    The provider makes the parser report errors in one line, and changes defaults of Megatron that could not run: on the
    host device ``hostdevice.host_defaults`` apply, and with --recover the rerun machine, which replays complete steps,
    is off.  A flag that the user gives takes precedence over these defaults, unless --recover implements it in another
    way (`refused`).  A flag that cannot run is refused (``problems``).
    """

    def provide(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        for other in others:
            parser = other(parser)
        if "--recover" not in parser._option_string_actions:  # a script with another loop may have added the flags
            add_recover_arguments(parser)
        if hostdevice.is_active():
            _make_defaults(parser, hostdevice.host_defaults())
        if config.enabled:
            parser.set_defaults(rerun_mode="disabled")

        def error(message: str) -> NoReturn:
            # argparse would print Megatron's usage, a thousand lines, before the message.
            raise UserError(_with_suggestions(message, parser))

        if config.enabled:
            parse = parser.parse_known_args

            def parse_known_args(*args: Any, **kwargs: Any) -> Any:
                parsed, rest = parse(*args, **kwargs)
                for one in adjust(parsed):
                    say(one)
                for line in remarks(parsed):
                    _warn(line)
                return parsed, rest

            parser.parse_known_args = parse_known_args  # type: ignore[method-assign]
        if "--help" in sys.argv or "-h" in sys.argv:
            _fix_help(parser)
        parser.error = error  # type: ignore[method-assign]
        if os.environ.get("RANK", "0") != "0":
            parser.print_help = lambda file=None: None  # type: ignore[method-assign]  # one --help per run is enough
        return parser

    return provide


def _fix_help(parser: argparse.ArgumentParser) -> None:
    """Escape "%" in help texts that argparse cannot expand, since one such text of Megatron makes --help fail."""
    formatter = parser._get_formatter()
    for action in parser._actions:
        if action.help and action.help is not argparse.SUPPRESS:
            try:
                formatter._expand_help(action)
            except (ValueError, TypeError, KeyError):
                action.help = action.help.replace("%", "%%")


def _make_defaults(parser: argparse.ArgumentParser, flags: list[str]) -> None:
    """Make ``flags`` the parser's defaults, as if every command line began with these flags."""
    ones: list[Any] = [*parser._actions, *parser._mutually_exclusive_groups]
    required = [option for option in ones if option.required]
    for option in required:  # parse ``flags`` without the script's required flags
        option.required = False
    given = parser.parse_args(flags)
    for option in required:
        option.required = True
    names = [parser._option_string_actions[word.split("=")[0]].dest for word in flags if word.startswith("--")]
    parser.set_defaults(**{name: getattr(given, name) for name in names})


def _with_suggestions(message: str, parser: argparse.ArgumentParser) -> str:
    """Return argparse's error ``message``, with the names of similar flags if a flag is unknown."""
    prefix = "unrecognized arguments: "
    if not message.startswith(prefix):
        return f"{message} (all flags: --help)"
    known = list(parser._option_string_actions)
    parts = []
    for word in message.removeprefix(prefix).split():
        near = difflib.get_close_matches(word.split("=")[0], known, n=3) if word.startswith("--") else []
        parts.append(f"unknown flag {word}" + (f" (did you mean {' or '.join(near)}?)" if near else ""))
    return "; ".join(parts) + " (all flags: --help)"


def as_user_errors(call: Callable[[], Any]) -> Any:
    """Run ``call``, a part of Megatron that checks flags, and raise Megatron's errors as UserError.

    With RECOVER_TRACEBACK=1 in the environment the original error is raised.
    """
    try:
        return call()
    except (AssertionError, ValueError, RuntimeError, KeyError, ImportError, FileNotFoundError) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        if "megatron" not in Path(last.filename).parts or traceback_wanted():
            raise  # the error is not Megatron's, or the user has requested the traceback
        raise UserError(_refusal(error, last)) from None


def _refusal(error: Exception, last: traceback.FrameSummary) -> str:
    """Return Megatron's ``error`` as a refusal in one line, with the failed check if the error has no message."""
    where = f"{Path(*Path(last.filename).parts[-3:])}:{last.lineno}"
    words = " ".join(str(error).split()) or f"failed check: {(last.line or '').removeprefix('assert').strip()}"
    return f"Megatron refuses these flags: {words} ({where}; RECOVER_TRACEBACK=1 shows the traceback)"


# ---- our own checks ----------------------------------------------------------------------------------------------


def problems(args: argparse.Namespace, config: RecoverConfig, *, may_have_data: bool = False) -> list[str]:
    """Return every reason why a run with the flags ``args`` cannot start; empty if no reason is found.

    ``args``: parsed, but not validated by Megatron.  ``may_have_data``: True if the script may read data that
    Megatron's flags do not name.
    """
    found = [
        *_layout(args),
        *_data(args, may_have_data),
        *_device(args),
        *_packages(args),
        *_strictness(args),
        *_evaluation(args),
        *_folders(args, config),
    ]
    if config.enabled:
        found += [*arguments.problems(config), *_injection(args, config), *_number_of_replicas(args, config)]
        world = int(os.environ.get("WORLD_SIZE", "1"))
        found += refuse_unadjusted(args)
        found += [*cannot_recover(args, config), *cannot_shard(args, config), *cannot_shard_model(args, config, world)]
        found += [*hostdevice.never_summed(args), *cannot_use_nccl(config)]
    elif config.inject is not None:
        found.append("--recover-inject needs --recover: without it no fault is injected or survived")
    return found


def _sizes(args: argparse.Namespace) -> dict[str, int]:
    return {
        "--tensor-model-parallel-size": getattr(args, "tensor_model_parallel_size", 1),
        "--pipeline-model-parallel-size": getattr(args, "pipeline_model_parallel_size", 1),
        "--context-parallel-size": getattr(args, "context_parallel_size", 1),
    }


def _number_of_replicas(args: argparse.Namespace, config: RecoverConfig) -> list[str]:
    """Refuse a run that starts with fewer than --recover-min-replicas, or cannot grow to --recover-max-replicas."""
    world, one = int(os.environ.get("WORLD_SIZE", "1")), math.prod(_sizes(args).values())
    if one < 1:
        return []  # Megatron reports which size is wrong
    lanes = inner_ranks_of(args, world)
    replica = one * lanes
    grow = cannot_grow(args, config, world // replica, lanes)
    if config.min_replicas <= max(1, world // replica):
        return grow
    return [
        *grow,
        f"--recover-min-replicas {config.min_replicas}: this run starts with {world // replica} replicas "
        f"({world} workers, {replica} per replica): lower the value, or start more workers",
    ]


def _layout(args: argparse.Namespace) -> list[str]:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    sizes = _sizes(args)
    replica = math.prod(sizes.values())
    if replica < 1:
        return []  # Megatron reports which size is wrong
    if world % replica == 0:
        return _batch(args, world // replica)
    product = " x ".join(f"{flag} {size}" for flag, size in sizes.items() if size > 1)
    return [
        f"{world} workers are not a multiple of the replica size {replica} ({product}): start a multiple of {replica} "
        f"(recover-run --nproc-per-node, --nnodes) or change these sizes"
    ]


def _batch(args: argparse.Namespace, ranks: int) -> list[str]:
    """Refuse global batches that are not divisible into microbatches for ``ranks`` data-parallel ranks.

    If a run resumes with a batch size schedule, `resumed` checks the next batch, and train() checks later batches.
    """
    return misfits(args, ranks, batches_to_come(args))


def _data(args: argparse.Namespace, may_have_data: bool) -> list[str]:
    """Refuse missing data and tokenizer files, for which Megatron would fail only after the start, on some workers."""
    found = []
    sources = ("data_path", "data_args_path", "train_data_path", "per_split_data_args_path", "sft", "perform_rl_step")
    external = getattr(args, "dataloader_type", None) == "external"
    if (
        not may_have_data
        and not getattr(args, "mock_data", False)
        and not external
        and not any(getattr(args, name, None) for name in sources)
    ):
        found.append(
            "no training data: give --data-path PREFIX (files PREFIX.bin and PREFIX.idx; create them "
            "with scripts/prepare_corpus.py or Megatron's tools/preprocess_data.py), or --mock-data"
        )
    for flag in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        for prefix in _prefixes(getattr(args, flag, None) or []):
            missing = [suffix for suffix in (".bin", ".idx") if not Path(prefix + suffix).is_file()]
            if missing and not (getattr(args, "sft", False) and Path(prefix).exists()):
                files = " and ".join(prefix + suffix for suffix in missing)
                found.append(
                    f"--{flag.replace('_', '-')} {prefix}: no {files} here (give the path without .bin or .idx; "
                    "scripts/prepare_corpus.py creates both from text)"
                )
    for flag in ("data_args_path", "per_split_data_args_path", "vocab_file", "merge_file"):
        path = getattr(args, flag, None)
        if path and "://" not in path and not Path(path).is_file():
            found.append(f"--{flag.replace('_', '-')} {path}: no such file")
    return found


def _evaluation(args: argparse.Namespace) -> list[str]:
    """Refuse a run without --eval-interval: Megatron would divide by it after it has built the model."""
    if (
        getattr(args, "eval_interval", 1)
        or getattr(args, "full_validation", False)
        or getattr(args, "skip_train", False)
    ):
        return []
    return [
        "give --eval-interval N with N > 0 (and --eval-iters 0 for no evaluation): without this flag Megatron fails "
        "when it counts the samples of its evaluations"
    ]


@functools.cache
def _warn(line: str) -> None:
    """Log the warning ``line`` on rank 0, and only once, although Megatron parses its flags repeatedly."""
    if os.environ.get("RANK", "0") == "0":
        log.warning(line)


def remarks(args: argparse.Namespace) -> list[str]:
    """Return warnings about flags that Megatron (0.18 to 0.20) accepts but ignores or applies wrongly."""
    found = []
    if getattr(args, "rampup_batch_size", None):
        found.append(
            "--rampup-batch-size: Megatron ignores it and uses --global-batch-size from the first iteration on. "
            "For a growing batch use --step-batch-size-schedule"
        )
    if getattr(args, "step_batch_size_schedule", None) and not getattr(args, "train_samples", None):
        found.append(
            "--step-batch-size-schedule with --train-iters: Megatron counts the warm-up and decay of the learning rate "
            "in batches of one microbatch for each data-parallel rank, so both end early, possibly in the first "
            "iteration. Give --train-samples, --lr-decay-samples and --lr-warmup-samples instead of --train-iters, "
            "--lr-decay-iters and --lr-warmup-iters"
        )
    if getattr(args, "save", None) and not _strictness(args):
        found += _unloadable(args)
    return found


def _strictness(args: argparse.Namespace) -> list[str]:
    """Refuse --dist-ckpt-strictness if Megatron could then not load the checkpoint in --load."""
    path = getattr(args, "load", None)
    return _unloadable(args) if path and (Path(path) / "latest_checkpointed_iteration.txt").exists() else []


def _unloadable(args: argparse.Namespace) -> list[str]:
    """Return a message if --dist-ckpt-strictness keeps Megatron from loading checkpoints of the installed torch.

    With this flag Megatron (0.18 to 0.20) creates a tensor for each key by ``torch.empty(size, **properties)``.  The
    properties that torch 2.15 writes include ``strides``, which ``torch.empty`` does not accept.
    """
    from torch.distributed.checkpoint.metadata import TensorProperties

    given, default = getattr(args, "dist_ckpt_strictness", None), "assume_ok_unexpected"
    other = getattr(args, "ckpt_format", "torch_dist") != "torch_dist"
    if given in (None, default) or other or "strides" not in TensorProperties.__dataclass_fields__:
        return []
    return [
        f"--dist-ckpt-strictness {given}: with torch {importlib.metadata.version('torch')} Megatron cannot load a "
        "checkpoint (TypeError: empty() got an unexpected keyword argument 'strides'): remove the flag; the "
        f"default is {default}"
    ]


def _packages(args: argparse.Namespace) -> list[str]:
    """Refuse flags that need a Python package that is not installed; Megatron would import it only after the start."""
    # package -> (module, argument, values of the argument that need the package, or () if any value does)
    wanted: dict[str, tuple[str, str, tuple[str, ...]]] = {
        "emerging-optimizers": ("emerging_optimizers", "optimizer", EMERGING),
        "wandb": ("wandb", "wandb_project", ()),
        "sentencepiece": ("sentencepiece", "tokenizer_type", ("SentencePieceTokenizer", "Llama2Tokenizer")),
        "transformers": ("transformers", "tokenizer_type", ("HuggingFaceTokenizer",)),
        "tiktoken": ("tiktoken", "tokenizer_type", ("TikTokenizer",)),
    }
    return [
        f"--{name.replace('_', '-')} {value} needs the Python package {package}, which is not installed for "
        f"{sys.executable}: pip install {package}"
        for package, (module, name, values) in wanted.items()
        if (value := getattr(args, name, None)) and (not values or value in values) and not _installed(module)
    ]


def _installed(module: str) -> bool:
    return module in sys.modules or importlib.util.find_spec(module) is not None


def _prefixes(blend: Sequence[str]) -> list[str]:
    """Return the local dataset prefixes of ``blend`` (PREFIX ... or WEIGHT PREFIX ...), without URLs."""
    return [word for word in map(str, blend) if not _is_number(word) and "://" not in word]


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _device(args: argparse.Namespace) -> list[str]:
    if hostdevice.is_active():
        return hostdevice.unsupported(args)
    import torch

    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    here = torch.cuda.device_count()
    if local > here:
        return [f"{local} workers on this machine, but only {here} CUDA devices: lower --nproc-per-node to {here}"]
    return []


def _injection(args: argparse.Namespace, config: RecoverConfig) -> list[str]:
    """Refuse a --recover-inject that cannot be parsed, or that names workers that do not exist."""
    if config.inject is None:
        return []
    try:
        faults = parse_spec(config.inject)
    except ValueError as error:
        return [f"--recover-inject: {error}"]
    world = int(os.environ.get("WORLD_SIZE", "1"))
    return [
        f"--recover-inject {fault}: there is no worker {fault.worker} in a run of {world} workers"
        for fault in faults
        if fault.worker >= world and not config.max_replicas
    ]


def _folders(args: argparse.Namespace, config: RecoverConfig) -> list[str]:
    """Refuse folders that cannot be created or written.

    To spare a shared file system, only one worker of each host tests the folders, and if only rank 0 will write
    checkpoints, only rank 0 tests the checkpoint folders.  Each worker tests its TMPDIR, which its
    checkpoint writer uses.
    """
    first_here = os.environ.get("LOCAL_RANK", "0") == "0"
    wanted = {"--recover-log-dir": config.log_dir if config.enabled and first_here else None}
    writes = getattr(args, "save", None) and getattr(args, "ckpt_format", None) != "torch"
    each_host = config.enabled or (writes and getattr(args, "ckpt_fully_parallel_save", True))
    if os.environ.get("RANK", "0") == "0" or (first_here and each_host):
        wanted |= {f"--{name.replace('_', '-')}": getattr(args, name, None) for name in SAVES}
    return [
        f"{flag} {folder}: {why} on host {socket.gethostname()}; choose a folder that all hosts can write to"
        for flag, folder in wanted.items()
        if folder and "://" not in str(folder) and (why := why_not_used(Path(folder)))
    ] + (_sockets() if writes else [])


def _sockets() -> list[str]:
    """Return why multiprocessing cannot open a socket in TMPDIR for the checkpoint writers; empty if it can."""
    try:
        with tempfile.TemporaryDirectory(prefix="pymp-") as folder, socket.socket(socket.AF_UNIX) as tried:
            tried.bind(f"{folder}/listener-12345678")
        return []
    except OSError as error:
        why = error.strerror or error
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as tried:
        tried.bind(path := arbitrary_address("AF_UNIX"))  # a later Python may use a shorter path than the one above
        os.unlink(path)
        return []
    return [
        f"TMPDIR {tempfile.gettempdir()}: {why}: the processes that write a checkpoint create sockets in this folder, "
        "and a socket's path is limited to 107 bytes: set TMPDIR to a short path on a disk of this host"
    ]


SAVES = ("save", "non_persistent_global_ckpt_dir")
"""Megatron's arguments that name folders into which Megatron writes nothing before the first checkpoint."""
