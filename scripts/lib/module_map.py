"""Pages of the docs that list the modules and the hooks, made from the sources; scripts/reference.py writes them.

docs/reference/modules.md   every module and the first line of its docstring; nothing is imported for it
docs/reference/hooks.md     the functions of Megatron that --recover wraps, and which module wraps them
"""

from __future__ import annotations

import ast
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from recover_megatron.integrate import ROLES  # noqa: E402
from recover_megatron.megatron_hooks import monkeypatch  # noqa: E402
from recover_megatron.megatron_hooks.loop.megatron_lm import SEAMS  # noqa: E402

PACKAGE = ROOT / "recover_megatron"
HOOKS = PACKAGE / "megatron_hooks"


def page(title: str, *lines: str) -> str:
    """Return the text of a page with a title and lines."""
    return "\n".join([f"# {title}", "", *lines, ""])


def wrapped(text: str, mark: str = "") -> str:
    """Return a paragraph, or with ``mark`` an item of a list, in lines of 120 columns."""
    indent = " " * len(mark)
    return textwrap.fill(f"{mark}{text}", 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def cell(text: str) -> str:
    """Return text of a docstring as a cell of a table."""
    return text.replace("``", "`").replace("|", "\\|").replace("<", "&lt;")


def first_line(path: Path) -> str:
    """Return the first line of a module's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return cell(" ".join(text.split("\n\n")[0].split()))


def modules() -> str:
    """Return the text of docs/reference/modules.md."""
    folders = sorted({path.parent for path in PACKAGE.rglob("*.py")})
    lines = [
        "> Every module of `recover_megatron` and the first line of its docstring, for developers. Layers and reading",
        "> order: [architecture.md](../architecture.md).",
    ]
    for folder in folders:
        name = folder.relative_to(ROOT).as_posix()
        lines += [
            "",
            f"## {name}",
            "",
            wrapped(first_line(folder / "__init__.py")),
            "",
            "| module | |",
            "| --- | --- |",
        ]
        for path in sorted(folder.glob("*.py")):
            if path.name != "__init__.py":
                lines.append(f"| `{path.stem}` | {first_line(path)} |")
    return page("Modules", *lines)


def users(name: str, sources: dict[str, str]) -> str:
    """Return the modules that wrap the seam or role ``name``; if none does, modules with the name or its last part."""
    last = name.rpartition(".")[2]
    for word in (f'wrap("{name}"', f'"{name}"', f'"{last}"', last):
        if found := [f"`{module}`" for module, text in sources.items() if word in text]:
            return ", ".join(found)
    return ""


def hooks() -> str:
    """Return the text of docs/reference/hooks.md."""
    listing = {"monkeypatch", "loop/megatron_lm", "loop/bridge"}
    named = {path.relative_to(HOOKS).with_suffix("").as_posix(): path for path in sorted(HOOKS.rglob("*.py"))}
    sources = {name: path.read_text(encoding="utf-8") for name, path in named.items() if name not in listing}

    def of_core(seams: dict[str, monkeypatch.Seam]) -> Iterator[str]:
        yield from ("", "| function | of | wrapped or replaced by |", "| --- | --- | --- |")
        for seam in seams.values():
            some = " (not in every version)" if seam.optional else ""
            yield f"| `{seam.name}`{some} | `{seam.module}` | {users(seam.name, sources)} |"

    lines = [
        "> The functions of Megatron that `--recover` wraps, and the modules of `megatron_hooks/` that wrap them, for",
        "> developers. Each is checked by name and parameters first; without `--recover` none is wrapped.",
        "> Rules for a hook: [architecture.md](../architecture.md).",
        "",
        "## Roles of a training loop",
        "",
        "Another loop fills the same roles: [integrate.md](../integrate.md).",
        "",
        "| role | in Megatron-LM | called | wrapped by |",
        "| --- | --- | --- | --- |",
    ]
    for role in ROLES:
        functions = ", ".join(f"`{seam.module}.{seam.name}`" for seam in SEAMS.get(role.name, ()))
        optional = "" if role.required else " (optional)"
        lines.append(f"| `{role.name}`{optional} | {functions} | {cell(role.when)} | {users(role.name, sources)} |")
    lines += ["", "## Megatron-Core", *of_core(monkeypatch.SEAMS)]
    lines += ["", "## Megatron-FSDP", "", "With `--use-megatron-fsdp`.", *of_core(monkeypatch.FSDP_SEAMS)]
    lines += ["", "## The user's own script", "", "It takes `--recover`, or is refused.", *of_core(monkeypatch.ENTRY)]
    return page("Hooks", *lines)
