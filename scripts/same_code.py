"""Show that a commit only moves modules: the same code as before, but for imports, docstrings and names of modules.

    python scripts/same_code.py [BEFORE [AFTER]]

The revisions are HEAD~1 and HEAD by default; exit status 1: code differs.

A file is compared with the one that git takes it to be renamed from.  What must be equal is the syntax tree without
imports and docstrings.  Other strings that differ are printed: names of modules in them are for the reader to check.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from recover_megatron import __version__


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout


def changed(before: str, after: str) -> Iterator[tuple[str, str]]:
    """The Python files that a revision changed, by the names that they had and have; an empty name: it had none."""
    for line in git("diff", "--name-status", "-M40%", before, after).splitlines():
        status, *paths = line.split("\t")
        if paths[-1].endswith(".py"):
            yield ("" if status == "A" else paths[0]), ("" if status == "D" else paths[-1])


class Bare(ast.NodeTransformer):
    """Takes imports and docstrings out of a tree, and collects its other strings, which become empty."""

    def __init__(self) -> None:
        self.strings: list[str] = []

    def visit_Import(self, node: ast.Import) -> None:
        return None

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        return None

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            return None
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str):
            self.strings.append(node.value)
            return ast.copy_location(ast.Constant(""), node)
        return node


def bare(revision: str, path: str) -> tuple[str, list[str]]:
    """The syntax tree of a file as text, and the strings in it."""
    visitor = Bare()
    tree = visitor.visit(ast.parse(git("show", f"{revision}:{path}"))) if path else ast.Module([], [])
    return ast.dump(tree), visitor.strings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument("before", nargs="?", default="HEAD~1")
    parser.add_argument("after", nargs="?", default="HEAD")
    given = parser.parse_args()
    equal, different = 0, []
    for old, new in changed(given.before, given.after):
        (old_code, old_strings), (new_code, new_strings) = bare(given.before, old), bare(given.after, new)
        if old_code != new_code:
            different.append(new or old)
            continue
        equal += 1
        for was, now in zip(old_strings, new_strings, strict=True):
            if was != now:
                print(f"{new}: {was!r} -> {now!r}")
    print(f"{equal} files have the same code; it differs in {len(different)}: {', '.join(different) or 'none'}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
