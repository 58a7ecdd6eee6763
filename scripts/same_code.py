"""Check that two revisions differ only in imports, comments, docstrings, other strings and, with --names, identifiers.

    python scripts/same_code.py [--names] [BEFORE [AFTER]]

BEFORE and AFTER are HEAD~1 and HEAD by default.  Exit status 1: the code of a file differs.

The script compares the syntax trees of each changed Python file, without imports and docstrings.  A renamed file is
compared with the file from which git considers it renamed.  In an f-string the literal parts and the order of the
values may differ, but not the set of values.

The script prints all strings and identifiers that differ; a person must check them.  With --names it also prints the
functions in which two variables have become one.  That is an error if both variables are in the same scope.
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
    """Yield (old path, new path) of each Python file that differs between two revisions.

    A path is "" if the file does not exist in that revision.
    """
    for line in git("diff", "--name-status", "-M40%", before, after).splitlines():
        status, *paths = line.split("\t")
        if paths[-1].endswith(".py"):
            yield ("" if status == "A" else paths[0]), ("" if status == "D" else paths[-1])


class Bare(ast.NodeTransformer):
    """Visitor that removes imports and docstrings from a syntax tree, and replaces other strings by empty strings.

    ``strings``, ``names``: the replaced strings, and with ``names=True`` the replaced identifiers.
    """

    def __init__(self, *, names: bool) -> None:
        self.strings: list[str] = []
        self.names: list[str] = []
        self._names = names

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

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        self.strings.append(ast.unparse(node))
        values = [self.visit(value) for value in node.values if isinstance(value, ast.FormattedValue)]
        return ast.copy_location(ast.JoinedStr(sorted(values, key=ast.dump)), node)

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Visit the children; with ``names=True``, first collect the node's identifiers and make them empty."""
        for field in ("id", "attr", "arg", "name") if self._names else ():
            if isinstance(getattr(node, field, None), str):
                self.names.append(getattr(node, field))
                setattr(node, field, "")
        return super().generic_visit(node)


def bare(revision: str, path: str, *, names: bool) -> tuple[str, list[str], list[str]]:
    """Return the syntax tree of a file, after ``Bare``, as text, and the strings and identifiers that were removed."""
    visitor = Bare(names=names)
    tree = visitor.visit(ast.parse(git("show", f"{revision}:{path}"))) if path else ast.Module([], [])
    return ast.dump(tree), visitor.strings, visitor.names


def source(revision: str, path: str) -> str:
    """Return the text of a file in a revision; "" if ``path`` is ""."""
    return git("show", f"{revision}:{path}") if path else ""


def names_of_functions(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield (name, identifiers) of each function; the identifiers include those of nested functions.

    Functions and identifiers are in the order of the syntax tree.
    """
    for function in ast.walk(ast.parse(text)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            found = (getattr(node, "id", None) or getattr(node, "arg", None) for node in ast.walk(function))
            yield function.name, [name for name in found if name]


def joined(before: str, after: str) -> Iterator[str]:
    """Yield a line for each function in which several variables have got the same new name.

    ``before``, ``after``: the text of the file in both revisions.
    """
    for (_, old), (name, new) in zip(names_of_functions(before), names_of_functions(after), strict=True):
        were: dict[str, set[str]] = {}
        for was, now in zip(old, new, strict=True):
            were.setdefault(now, set()).add(was)
        yield from (f"{name}: {sorted(names)} are now {now}" for now, names in were.items() if len(names) > 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument("--names", action="store_true", help="allow renamed identifiers")
    parser.add_argument("before", nargs="?", default="HEAD~1")
    parser.add_argument("after", nargs="?", default="HEAD")
    given = parser.parse_args()
    equal, different = 0, []
    for old, new in changed(given.before, given.after):
        old_code, *old_words = bare(given.before, old, names=given.names)
        new_code, *new_words = bare(given.after, new, names=given.names)
        if old_code != new_code:
            different.append(new or old)
            continue
        equal += 1
        for line in joined(source(given.before, old), source(given.after, new)) if given.names else ():
            print(f"{new}: check the scopes in {line}")
        for were, are in zip(old_words, new_words, strict=True):
            for was, now in dict.fromkeys(zip(were, are, strict=True)):
                if was != now:
                    print(f"{new}: {was!r} -> {now!r}")
    print(f"{equal} files have the same code; it differs in {len(different)}: {', '.join(different) or 'none'}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
