"""Check that recover_megatron can wrap the functions of a given Megatron, whose sources are read, not imported.

    python scripts/check_megatron.py CHECKOUT          # of Megatron-LM or Megatron-Bridge, or an unpacked wheel
    python scripts/check_megatron.py CHECKOUT --json   # the parameters, as tests/megatron_hooks/bridge_parameters.json

Prints one line for every function that is wrapped or replaced: it fits; it fits, but its body differs from the
installed Megatron (read the change); it does not fit.  Functions that the host device changes are listed, too, because
a fix that does not fit ends every run without a GPU.  Then the script checks the names that the hooks read: a name in a
module or class must be in that module or class, a name of another object anywhere.  Exit code 0: everything fits; 1:
misfits are listed, with reasons.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import recover_megatron
from recover_megatron.hostdevice.megatron_fixes import FIXES
from recover_megatron.integrate import Seam, unlike
from recover_megatron.megatron_hooks import monkeypatch
from recover_megatron.megatron_hooks.loop.megatron_lm import SEAMS

PACKAGE = Path(recover_megatron.__file__).parent
Found = tuple[str, ast.AST]
"""Module and node of a definition.  The node is an empty module for a module, and if the sources are missing."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Sources:
    """Sources of a Megatron.  ``root``: the folder that contains ``megatron/``."""

    root: Path
    _trees: dict[str, ast.Module | None] = field(default_factory=dict)
    _known: dict[tuple[str, str], Found | None] = field(default_factory=dict)

    def tree(self, module: str) -> ast.Module | None:
        """Return the syntax tree of a module; None if it does not exist; empty for a folder without ``__init__.py``."""
        if module not in self._trees:
            path = self.root.joinpath(*module.split("."))
            files = [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]
            empty = ast.Module([], []) if path.is_dir() else None
            self._trees[module] = ast.parse(files[0].read_text(encoding="utf-8")) if files else empty
        return self._trees[module]

    def find(self, module: str, name: str) -> Found | None:
        """Return the definition of ``name``, which may have dots, in ``module``; None if there is none."""
        head, _, rest = name.partition(".")
        if (module, head) not in self._known:
            self._known[module, head] = None  # ends the search if modules import each other
            self._known[module, head] = self._look(module, head)
        found = self._known[module, head]
        if found is None or not rest:
            return found
        where, node = found
        if isinstance(node, ast.Module):
            return found if self.tree(where) is None else self.find(where, rest)
        return self._of_class(where, node, rest) if isinstance(node, ast.ClassDef) else None

    def _look(self, module: str, name: str) -> Found | None:
        for node in _flat(self.tree(module) or ast.Module([], [])):
            if isinstance(node, ast.ImportFrom) and (found := self._imported(module, node, name)):
                return found
            if name == _defines(node):
                return module, node
        submodule = f"{module}.{name}"
        return (submodule, ast.Module([], [])) if self.tree(submodule) else None

    def _imported(self, module: str, node: ast.ImportFrom, name: str) -> Found | None:
        asked = [alias.name for alias in node.names if (alias.asname or alias.name) in (name, "*")]
        if not asked:
            return None
        is_package = self.root.joinpath(*module.split("."), "__init__.py").is_file()
        package = module if is_package else module.rpartition(".")[0]
        origin = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
        if self.tree(origin) is None:
            return None if asked == ["*"] else (origin, ast.Module([], []))
        return self.find(origin, name if asked == ["*"] else asked[0])

    def _of_class(self, module: str, node: ast.ClassDef, name: str) -> Found | None:
        own = [part for part in ast.walk(node) if name == _defines(part)]
        bases = [found for base in node.bases if (found := self.find(module, f"{ast.unparse(base)}.{name}"))]
        return (module, own[0]) if own else next(iter(bases), None)

    def function(self, seam: Seam) -> ast.AST | None:
        """Return the definition of a seam; None if missing, an empty module if it is imported from other sources."""
        found = self.find(seam.module, seam.name)
        if found is None and seam.formerly:
            found = self.find(seam.module, f"{seam.formerly}.{seam.name.rpartition('.')[2]}")
        return found and found[1]

    def body(self, seam: Seam) -> str:
        """Return the parameters and the body of a function as text that can be compared."""
        node = self.function(seam)
        if not isinstance(node, Function):
            return ""
        return "\n".join(map(ast.dump, [node.args, *node.body[ast.get_docstring(node) is not None :]]))

    def words(self) -> set[str]:
        """Return all names in the code, and all flags, written as names with underscores."""
        texts = (path.read_text(encoding="utf-8") for path in sorted(self.root.glob("megatron/[ct]*/**/*.py")))
        return {word.lstrip("-").replace("-", "_") for text in texts for word in re.findall(r"--[a-z0-9-]+|\w+", text)}


def _flat(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes inside a module or class, but not those inside its functions and classes."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, Function | ast.ClassDef):
            yield from _flat(child)


def _defines(node: ast.AST) -> str:
    """Return the name that ``node`` defines (a function, class or assignment's target); empty if it defines none."""
    if isinstance(node, Function | ast.ClassDef):
        return node.name
    is_set = isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store)
    return str(getattr(node, "id", None) or getattr(node, "attr", "")) if is_set else ""


def signatures(sources: Sources, wanted: Sequence[Seam]) -> dict[str, list[str] | None]:
    """Return wrapped function -> its parameters; empty if it is from other sources, None if it does not exist."""
    found = {}
    for seam in wanted:
        node = sources.function(seam)
        one = node.args if isinstance(node, Function) else ast.arguments([], [], None, [], [], None, [])
        names = [each.arg for each in (*one.posonlyargs, *one.args, *one.kwonlyargs)]
        found[f"{seam.module}.{seam.name}"] = None if node is None else names
    return found


def misfits(found: dict[str, list[str] | None], wanted: Sequence[Seam]) -> dict[str, str]:
    """Return function that does not fit -> reason.  A function from other sources is only checked when a run starts."""
    reasons = {}
    for name, seam in ((f"{seam.module}.{seam.name}", seam) for seam in wanted):
        one = found[name]
        why = f"{name} does not exist" if one is None and not seam.optional else None
        reasons[name] = unlike(name, one, seam.parameters, seam.named) if one else why
    return {name: why for name, why in reasons.items() if why}


def fixed(*versions: Sources) -> dict[str, tuple[Seam, str | None]]:
    """Return function that a host device fix expects -> its seam, and its parameters separated by spaces (None: any).

    Fixes of modules that none of ``versions`` has are left out.
    """
    return {
        f"{fix.module_name}.{name}": (Seam(fix.module_name, name), parameters)
        for fix in FIXES.values()
        for name, parameters in fix.expects.items()
        if any(version.tree(fix.module_name) for version in versions)
    }


def unfixable(found: dict[str, list[str] | None], wanted: dict[str, tuple[Seam, str | None]]) -> dict[str, str]:
    """Return function that the host device cannot change -> reason."""
    return {
        name: f"{name} has parameters ({', '.join(one)}), the host device expects ({', '.join(parameters.split())})"
        for name, (_, parameters) in wanted.items()
        if (one := found[name]) and parameters is not None and one != parameters.split()
    }


def reads(tested: Sources) -> tuple[set[tuple[str, str]], set[str]]:
    """Return the names that the hooks read of Megatron: (module, name) if the module is known, else names alone.

    Names that ``tested`` lacks are left out, because the hooks also probe for names of other versions.
    """
    exact, anywhere, ours = set(), set(), set()
    for file in sorted(PACKAGE.rglob("*.py")):
        nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        ours |= {one.arg if isinstance(one, ast.arg) else _defines(one) for one in nodes if not hasattr(one, "attr")}
        known = {
            alias.asname or alias.name: (str(node.module), alias.name)
            for node in nodes
            if isinstance(node, ast.ImportFrom) and re.match(r"megatron\.(core|training)", str(node.module))
            for alias in node.names
        }
        exact |= set(known.values())
        for of, names in map(_asked, nodes if "megatron_hooks" in file.parts else ()):
            if of in known:
                exact |= {(known[of][0], f"{known[of][1]}.{name}") for name in names}
            else:
                (ours if of in ("self", "cls") else anywhere).update(names)
    words = tested.words()
    return {one for one in exact if tested.find(*one)}, {name for name in anywhere - ours if name in words}


def _asked(node: ast.AST) -> tuple[str, list[str]]:
    """Return the object and the attributes that this node reads or sets, if any."""
    if isinstance(node, ast.Attribute):
        return ast.unparse(node.value), [node.attr]
    if isinstance(node, ast.Call) and node.args:
        name, of = ast.unparse(node.func), ast.unparse(node.args[0])
        if name in ("getattr", "hasattr") and isinstance(node.args[1], ast.Constant):
            return of, [str(node.args[1].value)]
        if name.endswith("replaced"):
            return of, [one.arg for one in node.keywords if one.arg]
    return "", []


def main() -> int:
    """Print the seams that fit and those that do not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"%(prog)s {recover_megatron.__version__}")
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    root = given.checkout / "src" if (given.checkout / "src" / "megatron").is_dir() else given.checkout
    sources = tested = Sources(root)
    spec = importlib.util.find_spec("megatron") and importlib.util.find_spec("megatron.core")
    of_host: dict[str, tuple[Seam, str | None]] = {}
    newer = False
    if is_bridge := (root / "megatron" / "bridge").is_dir():
        from recover_megatron.megatron_hooks.loop.bridge import seams  # imports Megatron, which takes long

        wanted = seams()
    elif (root / "megatron" / "core").is_dir():
        of_core = monkeypatch.ENTRY | monkeypatch.SEAMS | monkeypatch.FSDP_SEAMS
        headline = "no Megatron is installed here: bodies are not compared"
        if spec and spec.origin:
            tested = Sources(Path(spec.origin).parents[2])
            files = (one.root / "megatron/core/package_info.py" for one in (sources, tested))
            one, installed = map(monkeypatch.read_version, files)
            newer = monkeypatch.parse_release(one) >= monkeypatch.parse_release(installed)
            headline = f"Megatron {one}, compared with {installed}"
        of_host = fixed(sources, *[tested] * newer)
        wanted = [*(seam for one in SEAMS.values() for seam in one), *of_core.values()]
        wanted += [seam for seam, _ in of_host.values() if seam not in wanted]
    else:
        parser.error(f"{given.checkout} has neither megatron/core nor megatron/bridge")
    found = signatures(sources, wanted)
    why = misfits(found, wanted) | unfixable(found, of_host)
    if given.json:
        print(json.dumps({name: " ".join(one or ()) for name, one in found.items()}, indent=1))
        return bool(why)
    if not is_bridge:
        print(headline)
    for name, seam in zip(found, wanted, strict=True):
        changed = tested.body(seam) and sources.body(seam) != tested.body(seam)
        how = "does not fit" if name in why else "fits, its body changed" if changed else "fits"
        print(f"{how:24}{name}")
    reasons = list(why.values())
    if newer:
        exact, anywhere = reads(tested)
        reasons += [f"{'.'.join(one)} does not exist" for one in sorted(exact) if sources.find(*one) is None]
        reasons += [f"the name {name} no longer occurs" for name in sorted(anywhere - sources.words())]
        print(f"read by name: {len(exact)} of modules and classes, {len(anywhere)} of other objects")
    for reason in reasons:
        print(f"does not fit: {reason}", file=sys.stderr)
    print("not all fit" if reasons else "all fit")
    return bool(reasons)


if __name__ == "__main__":
    sys.exit(main())
