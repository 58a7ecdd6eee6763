"""Runs a training script when something is altered: altered.py MODULE.FUNCTION ARGUMENT... SCRIPT flags...

The function is one of ``pacing``, ``faulty``, ``unwritten``, ``instruments`` or ``calls`` and gets as many arguments as
it takes.  The script may be this one again.
"""

from __future__ import annotations

import importlib
import inspect
import runpy
import sys

from recover_megatron.arguments import config_from_argv
from recover_megatron.megatron_hooks.entry.program import choose_device


def altered(function: str, *arguments: object) -> tuple[str, ...]:
    """What is put before a script."""
    return (__file__, function, *map(str, arguments))


def main() -> None:
    choose_device(config_from_argv(sys.argv[1:]))  # as the script does: the modules may import Megatron
    module, _, name = sys.argv.pop(1).partition(".")
    function = getattr(importlib.import_module(f"tests.instep.{module}"), name)
    function(*(sys.argv.pop(1) for _ in inspect.signature(function).parameters))
    sys.argv[0] = sys.argv.pop(1)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
