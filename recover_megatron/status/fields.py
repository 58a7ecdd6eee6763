"""Fields of a JSON object that somebody else wrote: of the wrong kind, or not there, they count as not told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Raw = Mapping[str, Any]


def number(row: Raw, name: str) -> int | None:
    """A whole number; None: not told."""
    value = row.get(name)
    return value if type(value) is int else None


def seconds(row: Raw, name: str) -> float | None:
    """A number of seconds; None: not told."""
    value = row.get(name)
    return float(value) if isinstance(value, (int, float)) else None


def text(row: Raw, name: str) -> str:
    """Printable; empty: not told."""
    return printable(row.get(name) or "")


def printable(value: Any) -> str:
    """What a member sends must not steer the terminal that shows it."""
    return "".join(c if c.isprintable() else "?" for c in str(value))
