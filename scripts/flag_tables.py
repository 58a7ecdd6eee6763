"""Writes the tables of flags and of environment variables in the docs from these themselves.

    python scripts/flag_tables.py            writes them where they are out of date
    python scripts/flag_tables.py --check    exit status 1 where one is

A table stands between ``<!-- flags: NAME -->`` and ``<!-- end of flags -->``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from recover_megatron import __version__, arguments, variables  # noqa: E402
from recover_megatron.launch import arguments as launch_arguments  # noqa: E402
from recover_megatron.options import markdown_table  # noqa: E402

TABLES = {
    "operations.md": {
        "--recover-*": lambda: markdown_table(arguments.FLAGS, "when to touch it", helps=False),
        "variables": variables.markdown_table,
    },
    "launcher.md": {"recover-run": lambda: markdown_table(launch_arguments.FLAGS, "meaning", helps=True)},
}
"""File in docs/ -> its tables, by name, and what makes each."""
END = "<!-- end of flags -->"


def updated(page: str) -> tuple[Path, str, str]:
    """A page of the docs: its path, its text, and the text with the tables as they should be."""
    path = ROOT / "docs" / page
    text = new = path.read_text(encoding="utf-8")
    for name, table in TABLES[page].items():
        begin = f"<!-- flags: {name} -->\n"
        before, found, rest = new.partition(begin)
        _, ended, after = rest.partition(END)
        if not found or not ended:
            raise SystemExit(f"{path}: no {begin.strip()} followed by {END}")
        new = f"{before}{begin}{table()}\n{END}{after}"
    return path, text, new


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    stale = [(path, new) for path, old, new in map(updated, TABLES) if old != new]
    for path, new in stale:
        print(f"{path}: {'out of date: python scripts/flag_tables.py writes it' if check else 'written'}")
        if not check:
            path.write_text(new, encoding="utf-8")
    return 1 if stale and check else 0


if __name__ == "__main__":
    sys.exit(main())
