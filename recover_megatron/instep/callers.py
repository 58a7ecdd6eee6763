"""Finds the call that asks for an operation on a group: the recovery knows some, and an error names the place."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

_GROUPS = "recover_megatron.instep.process_group"
_BETWEEN = ("recover_megatron", "torch", "typing_extensions", "functools", "contextlib")
"""Packages whose frames may lie between a caller and a group."""


@dataclass(frozen=True)
class Caller:
    """A place in a program, and what it does with a group (the method of the group that torch called)."""

    module: str
    function: str
    operation: str = ""
    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        return f"{self.operation} at {self.file}:{self.line} ({self.function})"


def caller() -> Caller:
    """The caller of the operation on a group that is under way."""
    frame, operation = sys._getframe(1), ""
    while frame.f_back is not None and _module(frame).partition(".")[0] in _BETWEEN:
        if _module(frame) == _GROUPS:
            operation = frame.f_code.co_name
        frame = frame.f_back
    return Caller(_module(frame), frame.f_code.co_name, operation, frame.f_code.co_filename, frame.f_lineno)


def _module(frame: Any) -> str:
    return str(frame.f_globals.get("__name__", ""))
