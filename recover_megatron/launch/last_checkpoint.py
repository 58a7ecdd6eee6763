"""The last checkpoint of a run, by its files: there may be nobody left who could tell of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

_TRACKER = "latest_checkpointed_iteration.txt"
"""Megatron's, in the folder of --save: names an iteration when its checkpoint is complete."""


def save_folder(script_args: Sequence[str]) -> str | None:
    """Where a script with these arguments saves; None: nowhere."""
    folder = None
    for at, argument in enumerate(script_args):
        if argument == "--save" and at + 1 < len(script_args):
            folder = script_args[at + 1]
        elif argument.startswith("--save="):
            folder = argument.removeprefix("--save=")
    return folder


def last_checkpoint(script_args: Sequence[str]) -> str | None:
    """In words, of a script with these arguments; None: it saves none.  Looks at the disk."""
    folder = save_folder(script_args)
    if folder is None:
        return None
    try:
        newest = (Path(folder) / _TRACKER).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        newest = ""
    return f"iteration {newest} in {folder}" if newest else f"none is complete in {folder}"
