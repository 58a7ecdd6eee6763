"""The ``--recover-*`` flags: one argparse group, one dataclass, one place that checks them.

The flags join Megatron's own parser (``add_recover_arguments`` is an ``extra_args_provider``), so a user adds them to
the command line that trains today.  Nothing here imports torch or Megatron: the launcher and the device layer read the
same definitions before either is loaded.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from recover_megatron.errors import UserError

LOG_DIR_VARIABLE = "RECOVER_LOG_DIR"
"""Environment variable by which ``recover-run --log-dir`` tells its workers the default of ``--recover-log-dir``."""

DEVICES = ("auto", "cuda", "cpu")


@dataclass(frozen=True)
class RecoverConfig:
    """The checked values of the ``--recover-*`` flags of one worker."""

    enabled: bool = False
    """``--recover``: install the hooks.  Everything else but ``device`` has no effect without it."""
    log_dir: Path | None = None
    """Where ``steps.jsonl`` goes; None: it is not written."""
    device: str = "auto"
    """One of ``DEVICES``."""


def add_recover_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the group "recover" to ``parser`` and return it (the protocol of Megatron's ``extra_args_provider``)."""
    group = parser.add_argument_group(
        "recover", "fault tolerance by recover_megatron; without --recover the run is stock Megatron, no hook installed"
    )
    group.add_argument(
        "--recover",
        action="store_true",
        help="install the hooks of recover_megatron (today: the audit of microbatches in steps.jsonl; see README.md)",
    )
    group.add_argument(
        "--recover-log-dir",
        type=str,
        default=None,
        metavar="DIR",
        help="with --recover: folder for steps.jsonl, one line per iteration "
        f"(default: the --log-dir of recover-run, by the environment variable {LOG_DIR_VARIABLE})",
    )
    group.add_argument(
        "--recover-device",
        choices=DEVICES,
        default="auto",
        help="cuda: a GPU, or an error where there is none; cpu: run on the host device, without a GPU; "
        "auto (default): cuda where there is a CUDA device, else cpu",
    )
    return parser


def config_from_argv(argv: Sequence[str]) -> RecoverConfig:
    """Read our flags alone out of a whole command line (without the program's name).

    The device must be chosen before Megatron is imported, and Megatron's parser is part of Megatron; ``--yaml-cfg``
    replaces Megatron's namespace by one that has none of our flags.  Raises UserError for a bad value of ours; flags
    that are nobody's are refused later, by the whole parser.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    try:
        args, _ = add_recover_arguments(parser).parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        raise UserError(str(error)) from None
    log_dir = args.recover_log_dir or os.environ.get(LOG_DIR_VARIABLE)
    return RecoverConfig(enabled=args.recover, log_dir=Path(log_dir) if log_dir else None, device=args.recover_device)


def device_from_argv(argv: Sequence[str]) -> str:
    """``--recover-device`` in a script's command line; "auto" where it is bad, which the script refuses."""
    try:
        return config_from_argv(argv).device
    except UserError:
        return "auto"
