"""Flags as fields of a dataclass: each is written once.

    class Config:                                    add_options      the flags of an argparse parser or group
        spares: int = option(0, "...", metavar="N")  checked          the values that cannot be used, all of them

The flag of a field is its name with dashes (``--recover-spares``, given the prefix ``recover``), unless it has another.
``scripts/flag_tables.py`` makes the tables in the docs.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

Check = Callable[[Any], Any]
"""Raises ValueError with what to give instead; of a flag that is added ``as_text`` it returns the value read."""


@dataclass(frozen=True)
class Option:
    """What is known of one flag besides its value."""

    help: str
    """For ``--help``, without the default."""
    name: str = ""
    """With its dashes; empty: made of the field's name."""
    short: str = ""
    metavar: str | None = None
    """Of the value, with its unit: S for seconds, N for a number."""
    choices: tuple[str, ...] = ()
    check: Check | None = None
    environment: str = ""
    """Variable that stands in where the flag is not given."""
    default_text: str | None = None
    """The default in words; None: the default itself; empty: ``help`` tells it."""
    docs: str = ""
    """For the table in the docs, in Markdown: when to touch it, where more is told."""


class Dataclass(Protocol):
    """A class made by ``dataclass``."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


def option(default: Any, help: str, **about: Any) -> Any:
    """A field of a dataclass that is a flag; ``about``: further fields of ``Option``."""
    return dataclasses.field(default=default, metadata={"option": Option(help, **about)})


@dataclass(frozen=True)
class Flag:
    """A field and its flag."""

    field: str
    name: str
    default: Any
    option: Option

    @property
    def dest(self) -> str:
        return self.name[2:].replace("-", "_")

    @property
    def switch(self) -> bool:
        return isinstance(self.default, bool)

    @property
    def default_in_words(self) -> str:
        """Empty: there is none to tell."""
        if self.option.default_text is not None:
            return self.option.default_text
        return "" if self.switch or self.default is None else str(self.default)

    @property
    def help(self) -> str:
        """The text for argparse, which expands "%"."""
        told = f" (default: {self.default_in_words})" if self.default_in_words else ""
        return (self.option.help + told).replace("%", "%%")


def flags_of(config: type[Dataclass], prefix: str = "") -> Iterator[Flag]:
    """The flags of a dataclass, in the order of its fields.  ``prefix``: of their names."""
    for field in dataclasses.fields(config):
        about = field.metadata.get("option")
        if about is not None:
            words = [*([prefix] if prefix else []), *field.name.split("_")]
            yield Flag(field.name, about.name or "--" + "-".join(words), field.default, about)


def add_options(
    parser: argparse._ActionsContainer, flags: Sequence[Flag], *, as_text: bool = False, underscores: bool = False
) -> None:
    """Add ``flags`` to a parser or a group of one.

    ``as_text``: leave values unread, None where a flag is not given, for who collects all mistakes.  ``underscores``:
    accept ``--a_b`` for ``--a-b``, too.
    """
    for flag in flags:
        names = [*([flag.option.short] if flag.option.short else []), flag.name]
        if flag.switch:
            parser.add_argument(*names, action="store_true", help=flag.help)
            continue
        if underscores and "_" in flag.dest:
            names.append(f"--{flag.dest}")
        kind = str if flag.default is None or as_text else type(flag.default)
        parser.add_argument(
            *names,
            type=kind,
            choices=flag.option.choices or None,
            default=None if as_text else flag.default,
            metavar=flag.option.metavar,
            help=flag.help,
        )


def checked(config: Dataclass, flags: Sequence[Flag]) -> list[str]:
    """Every value that its check refuses, one line each, with what to give instead."""
    found = []
    for flag in flags:
        value = getattr(config, flag.field)
        try:
            if flag.option.check is not None and value is not None:
                flag.option.check(value)
        except ValueError as error:
            name = f"{flag.name} (or {flag.option.environment})" if flag.option.environment else flag.name
            found.append(f"{name} {value:g}: {error}" if isinstance(value, float) else f"{name} {value}: {error}")
    return found


def seconds_above_0(value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError("give a number of seconds above 0")


def seconds_from_0(value: float) -> None:
    if not 0 <= value < math.inf:
        raise ValueError("give a number of seconds, 0 or more")


def at_least(minimum: int, maximum: int | None = None) -> Check:
    """A check of whole numbers."""

    def check(value: int) -> None:
        if value < minimum or (maximum is not None and value > maximum):
            limits = f"{minimum} or more" if maximum is None else f"{minimum} to {maximum}"
            raise ValueError(f"give {limits}")

    return check
