"""Write the reference pages whose tables are data of the code: docs/reference/hostdevice.md and loop_roles.md.

python scripts/code_tables.py            writes the pages that are out of date
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from recover_megatron import __version__  # noqa: E402
from recover_megatron.hostdevice import flags, megatron_fixes, replacements  # noqa: E402
from recover_megatron.integrate import INTERFACE, ROLES  # noqa: E402

FOLDER = ROOT / "docs" / "reference"
LOOP_ROLES = """\
# Roles of a training loop

> For developers who connect a loop on megatron.core: each role of `recover_megatron.integrate`, its first parameters,
> whether a loop needs it, when the loop calls it and what it returns. The interface has version {}. How to use
> it is in [integrate](../integrate.md#connect-a-loop-on-megatroncore). `scripts/code_tables.py` writes this page.

{}
"""
HOSTDEVICE = """\
# The host device: tables

> For developers: which flags of Megatron cannot run on the [host device](../hostdevice.md), which names of torch it
> replaces, and what it fixes inside Megatron. `scripts/code_tables.py` writes this page from the code.

## What cannot run without a GPU

{}

## What is replaced in torch

{}

## What is fixed inside Megatron

{}
"""


def table(columns: str, rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table; ``columns``: names, separated by " | "."""
    lines = [columns, "| ".join(["--- "] * len(columns.split(" | "))).strip(), *map(" | ".join, rows)]
    return "\n".join(f"| {line} |" for line in lines)


def pages() -> dict[str, str]:
    """Return the text of each page by its name."""
    called = [f"`{its.name}({', '.join([*its.parameters, '...'])})`" for its in ROLES]
    needed = ["yes" if its.required else "" for its in ROLES]
    roles = zip(called, needed, [its.when.replace("``", "`") for its in ROLES], strict=True)
    rules = [re.sub(r"(.*?): (.*) \((megatron/[\w/]+\.py)\)", r"\1 | \2 | `\3`", rule.reason) for rule in flags.RULES]
    names: dict[str, str] = {}
    for entry in replacements.table():
        names[entry.why] = f"{names.get(entry.why, '')} `{entry.path}`".strip()
    fixes = [(name, f"`{fix.module_name}`", fix.why) for name, fix in megatron_fixes.FIXES.items()]
    return {
        "loop_roles.md": LOOP_ROLES.format(INTERFACE, table("role | needed | when the loop calls it", roles)),
        "hostdevice.md": HOSTDEVICE.format(
            table("flag | why, and what to do | file of Megatron", zip(rules, strict=True)),
            table("names | because", ((these, why) for why, these in names.items())),
            table("name | module | because", fixes),
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.parse_args()
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
