"""Writes the tables of flags and of environment variables in the docs from these themselves.

A table stands between ``<!-- flags: NAME -->`` and ``<!-- end of flags -->``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from recover_megatron import __version__, arguments, variables  # noqa: E402
from recover_megatron.launch.command_line import arguments as launch_arguments  # noqa: E402
from recover_megatron.options import Flag  # noqa: E402
from recover_megatron.variables import Rule  # noqa: E402


def flag_table(flags: Sequence[Flag], head: str, *, helps: bool) -> str:
    """A table of the flags, their defaults, and ``docs``, whose column is called ``head``.

    ``helps``: with the text of ``--help`` before ``docs``.
    """
    rows = [f"| flag | default | {head} |", "| --- | --- | --- |"]
    for flag in flags:
        value = "|".join(flag.option.choices) or flag.option.metavar or ""
        name = f"{flag.name} {value}".strip().replace("|", "\\|")
        short = f"`{flag.option.short}`, " if flag.option.short else ""
        default = flag.default_in_words or ("" if flag.default is None else str(flag.default))
        if flag.switch:
            default = "off"
        text = flag.option.docs
        if helps:
            text = flag.option.help.replace("<", "&lt;") + (f" ({text})" if text else "")
        rows.append(f"| {short}`{name}` | {default} | {text} |")
    return "\n".join(rows)


def variable_table() -> str:
    lines = ["| variable | yours is | why |", "| --- | --- | --- |"]
    for variable in variables.TABLE:
        names = ", ".join(f"`{name}`" for name in variable.names)
        to = f" to {variable.value}" if variable.value and variable.rule is Rule.DEFAULT else ""
        if variable.rule is Rule.OVERRULED:
            to = f": {variable.value}" if variable.value else ": unset"
        fine = [value for value in variable.fine if value not in ("", variable.value)]
        but = f" ({' and '.join(fine)} is fine)" if fine and variable.rule in (Rule.OVERRULED, Rule.REFUSED) else ""
        lines.append(f"| {names} | {variable.rule.value}{to}{but} | {variable.why} |")
    return "\n".join(lines)


TABLES = {
    "operations.md": {
        "--recover-*": lambda: flag_table(arguments.FLAGS, "when to touch it", helps=False),
        "variables": variable_table,
    },
    "launcher.md": {"recover-run": lambda: flag_table(launch_arguments.FLAGS, "meaning", helps=True)},
}
"""File in docs/ -> its tables, by name, and what makes each."""


@dataclass(frozen=True)
class Page:
    """A page of the docs, of which a part is made by a script."""

    path: Path
    text: str
    new: str
    """The text as it should be."""

    @classmethod
    def read(cls, path: Path) -> Page:
        """As it is."""
        text = path.read_text(encoding="utf-8")
        return cls(path, text, text)

    def with_part(self, begin: str, part: str, end: str) -> Page:
        """With ``part`` between the lines ``begin`` and ``end``."""
        before, found, rest = self.new.partition(f"{begin}\n")
        _, ended, after = rest.partition(end)
        if not found or not ended:
            raise SystemExit(f"{self.path}: no {begin} followed by {end}")
        return replace(self, new=f"{before}{begin}\n{part}\n{end}{after}")

    def settle(self) -> None:
        """Write it if it is out of date."""
        if self.text != self.new:
            self.path.write_text(self.new, encoding="utf-8")
            print(f"{self.path}: written")


def updated(name: str) -> Page:
    """A page of the docs, with its tables."""
    page = Page.read(ROOT / "docs" / name)
    for table, made in TABLES[name].items():
        page = page.with_part(f"<!-- flags: {table} -->", made(), "<!-- end of flags -->")
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.parse_args()
    for page in TABLES:
        updated(page).settle()


if __name__ == "__main__":
    main()
