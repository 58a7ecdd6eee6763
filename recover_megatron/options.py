"""Command-line flags as fields of a dataclass: each flag is defined once.

    class Config:                                    add_options      adds the flags to an argparse parser or group
        spares: int = option(0, "...", metavar="N")  checked          lists all values that cannot be used

A field's flag is the field's name with dashes, after a prefix if one is given (``--recover-spares``), unless
``Option.name`` is set.  ``scripts/reference.py`` writes the docs' tables of flags.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

Check = Callable[[Any], Any]
"""Function that raises ValueError for an invalid value of a flag; the error's text says which values are valid.

For flags that are added with ``as_text``, it also parses the text and returns the value.
"""


@dataclass(frozen=True)
class Option:
    """Description of one command-line flag."""

    help: str
    """Text for ``--help``, without the default."""
    name: str = ""
    """Flag with its dashes; empty if the field's name determines the flag."""
    short: str = ""
    metavar: str | None = None
    """Placeholder of the value in ``--help``, which also shows the unit: S for seconds, N for a number."""
    choices: tuple[str, ...] = ()
    check: Check | None = None
    environment: str = ""
    """Environment variable that is read if the flag is not given."""
    default_text: str | None = None
    """Text that describes the default in ``--help``; None to show the value, empty if ``help`` describes it."""
    docs: str = ""
    """Text for the docs' table of flags, in Markdown: when to change the flag, and where to read more."""


class Dataclass(Protocol):
    """Type of a class decorated by ``dataclass``."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


def option(default: Any, help: str, **about: Any) -> Any:
    """Return a dataclass field with a flag; ``help`` and ``about`` are fields of the flag's ``Option``."""
    return dataclasses.field(default=default, metadata={"option": Option(help, **about)})


@dataclass(frozen=True)
class Flag:
    """Flag, and the dataclass field that has its value."""

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
        """Text that describes the default in ``--help``; empty if none is shown."""
        if self.option.default_text is not None:
            return self.option.default_text
        return "" if self.switch or self.default is None else str(self.default)

    @property
    def help(self) -> str:
        """Text for ``--help``; each "%" is doubled, because argparse expands "%"."""
        suffix = f" (default: {self.default_in_words})" if self.default_in_words else ""
        return (self.option.help + suffix).replace("%", "%%")


def flags_of(config: type[Dataclass], prefix: str = "") -> Iterator[Flag]:
    """Yield the flags of a dataclass, in the order of its fields; ``prefix``: first word of the flags' names."""
    for field in dataclasses.fields(config):
        about = field.metadata.get("option")
        if about is not None:
            words = [*([prefix] if prefix else []), *field.name.split("_")]
            yield Flag(field.name, about.name or "--" + "-".join(words), field.default, about)


def add_options(
    parser: argparse._ActionsContainer, flags: Sequence[Flag], *, as_text: bool = False, underscores: bool = False
) -> None:
    """Add ``flags`` to a parser or to an argument group of a parser.

    ``as_text``: leave values unparsed, and use None for a flag that is not given, so that the caller can report all
    mistakes together.  ``underscores``: accept ``--a_b`` for ``--a-b``, too.
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
    """Return one message for each invalid value in ``config``: the flag, the value, and which values are valid."""
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
    """Return a check that accepts integers of at least ``minimum`` and at most ``maximum``, if it is not None."""

    def check(value: int) -> None:
        if value < minimum or (maximum is not None and value > maximum):
            limits = f"{minimum} or more" if maximum is None else f"{minimum} to {maximum}"
            raise ValueError(f"give {limits}")

    return check
