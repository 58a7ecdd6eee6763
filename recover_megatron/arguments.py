"""The ``--recover-*`` flags: one argparse group, one dataclass, one place that checks them.

The flags join Megatron's own parser (``add_recover_arguments`` is an ``extra_args_provider``), so a user adds them to the
command line that trains today.  Nothing here imports torch or Megatron: the launcher and the device layer read the same
definitions before either is loaded.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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


def device_from_argv(argv: Sequence[str]) -> str:
    """The value of ``--recover-device`` in ``argv``, read alone.

    The device must be chosen before Megatron is imported, and Megatron's parser is part of Megatron.  A value that is
    no choice counts as "auto" here; the full parser refuses it later with its proper message.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--recover-device", default="auto")
    try:
        known, _ = parser.parse_known_args(list(argv))
    except argparse.ArgumentError:
        return "auto"
    return known.recover_device if known.recover_device in DEVICES else "auto"


def config_from_args(args: argparse.Namespace) -> RecoverConfig:
    """Make the configuration from a parsed namespace.

    A namespace without our flags (``--yaml-cfg`` replaces Megatron's) gives the defaults: recovery off.
    """
    log_dir = getattr(args, "recover_log_dir", None) or os.environ.get(LOG_DIR_VARIABLE)
    return RecoverConfig(
        enabled=bool(getattr(args, "recover", False)),
        log_dir=Path(log_dir) if log_dir else None,
        device=getattr(args, "recover_device", "auto"),
    )
