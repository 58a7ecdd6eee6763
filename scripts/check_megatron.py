"""Check that recover_megatron can wrap the functions of a given version of Megatron.

    python scripts/check_megatron.py CHECKOUT          # folder of Megatron-LM or Megatron-Bridge, or an unpacked wheel
    python scripts/check_megatron.py CHECKOUT --json   # print the parameters of the functions as JSON

The script reads the sources of that Megatron, and does not import them.  It prints a line for every function that
recover_megatron or its host device wraps or replaces:

    fits                     the function has the expected parameters
    fits, its body changed   the body differs from the installed Megatron: a person must read the change
    does not fit             the function is missing, or has other parameters

Then the script checks the names that the hooks read.  If the hooks read a name from a module or class, this module or
class must define it; if they read it from another object, it must occur anywhere in the sources.  Exit code 0:
everything fits; 1: misfits are listed, with reasons.
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
"""(module, syntax tree of a definition in it); the tree is empty for a module, and if the sources are missing."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Sources:
    """Sources of one version of Megatron.  ``root``: the folder that contains ``megatron/``."""

    root: Path
    _trees: dict[str, ast.Module | None] = field(default_factory=dict)
    _known: dict[tuple[str, str], Found | None] = field(default_factory=dict)

    def tree(self, module: str) -> ast.Module | None:
        """Return the syntax tree of a module; None if the module does not exist.

        For a folder without ``__init__.py`` the tree is empty.
        """
        if module not in self._trees:
            path = self.root.joinpath(*module.split("."))
            files = [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]
            empty = ast.Module([], []) if path.is_dir() else None
            self._trees[module] = ast.parse(files[0].read_text(encoding="utf-8")) if files else empty
        return self._trees[module]

    def find(self, module: str, name: str) -> Found | None:
        """Return the definition of ``name`` in ``module``; None if ``module`` does not define it.

        ``name`` may have dots, such as ``Class.method``.  Imports are followed.
        """
        head, _, rest = name.partition(".")
        if (module, head) not in self._known:
            self._known[module, head] = None  # so that the search ends if modules import each other
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
        """Return the definition of a seam; None if it is missing.

        If Megatron imports the function from other sources, the result is an empty module.
        """
        found = self.find(seam.module, seam.name)
        if found is None and seam.formerly:
            found = self.find(seam.module, f"{seam.formerly}.{seam.name.rpartition('.')[2]}")
        return found and found[1]

    def body(self, seam: Seam) -> str:
        """Return the parameters and the body of a seam's function as text to compare; "" if it is no function."""
        node = self.function(seam)
        if not isinstance(node, Function):
            return ""
        return "\n".join(map(ast.dump, [node.args, *node.body[ast.get_docstring(node) is not None :]]))

    def words(self) -> set[str]:
        """Return all words of the code; a flag such as ``--tensor-size`` is returned as ``tensor_size``."""
        texts = (path.read_text(encoding="utf-8") for path in sorted(self.root.glob("megatron/[ct]*/**/*.py")))
        return {word.lstrip("-").replace("-", "_") for text in texts for word in re.findall(r"--[a-z0-9-]+|\w+", text)}


def _flat(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes inside a module or class, without the nodes inside functions and nested classes."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, Function | ast.ClassDef):
            yield from _flat(child)


def _defines(node: ast.AST) -> str:
    """Return the name of the function, class or variable that ``node`` defines; "" if it defines none."""
    if isinstance(node, Function | ast.ClassDef):
        return node.name
    is_set = isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store)
    return str(getattr(node, "id", None) or getattr(node, "attr", "")) if is_set else ""


def signatures(sources: Sources, wanted: Sequence[Seam]) -> dict[str, list[str] | None]:
    """Return full name of each function in ``wanted`` -> names of its parameters; None if it does not exist.

    If Megatron imports the function from other sources, the list is empty.
    """
    found = {}
    for seam in wanted:
        node = sources.function(seam)
        one = node.args if isinstance(node, Function) else ast.arguments([], [], None, [], [], None, [])
        names = [each.arg for each in (*one.posonlyargs, *one.args, *one.kwonlyargs)]
        found[f"{seam.module}.{seam.name}"] = None if node is None else names
    return found


def misfits(found: dict[str, list[str] | None], wanted: Sequence[Seam]) -> dict[str, str]:
    """Return name of each function that does not fit -> reason.

    A function that Megatron imports from other sources is not checked here, only when a run starts.
    """
    reasons = {}
    for name, seam in ((f"{seam.module}.{seam.name}", seam) for seam in wanted):
        one = found[name]
        why = f"{name} does not exist" if one is None and not seam.optional else None
        reasons[name] = unlike(name, one, seam.parameters, seam.named) if one else why
    return {name: why for name, why in reasons.items() if why}


def fixed(*versions: Sources) -> dict[str, tuple[Seam, str | None]]:
    """Return name of each function that a fix of the host device changes -> (its seam, expected parameters).

    The parameters are separated by spaces; None: any parameters.  A fix is left out if no version has its module.
    """
    return {
        f"{fix.module_name}.{name}": (Seam(fix.module_name, name), parameters)
        for fix in FIXES.values()
        for name, parameters in fix.expects.items()
        if any(version.tree(fix.module_name) for version in versions)
    }


def unfixable(found: dict[str, list[str] | None], wanted: dict[str, tuple[Seam, str | None]]) -> dict[str, str]:
    """Return name of each function that the host device cannot change -> reason."""
    return {
        name: f"{name} has parameters ({', '.join(one)}), the host device expects ({', '.join(parameters.split())})"
        for name, (_, parameters) in wanted.items()
        if (one := found[name]) and parameters is not None and one != parameters.split()
    }


def reads(tested: Sources) -> tuple[set[tuple[str, str]], set[str]]:
    """Return the names of Megatron that the hooks read: a set of (module, name), and a set of names alone.

    The second set has the names that are read from objects whose module is unknown.  Names that ``tested`` does not
    have are left out, because the hooks also look for names of other versions.
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
    """Return the object (as code) whose attributes this node reads or sets, and these attributes; else ("", [])."""
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
    """Run the command; return the exit status."""
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
        from recover_megatron.megatron_hooks.loop.bridge import seams  # imports Megatron, which takes seconds

        wanted = seams()
    elif (root / "megatron" / "core").is_dir():
        of_core = monkeypatch.ENTRY | monkeypatch.SEAMS | monkeypatch.FSDP_SEAMS
        headline = "no Megatron is installed here: bodies are not compared"
        if spec and spec.origin:
            tested = Sources(Path(spec.origin).parents[2])
            files = (one.root / "megatron/core/package_info.py" for one in (sources, tested))
            one, installed = map(monkeypatch.read_version, files)
            newer = monkeypatch.parse_release(one) >= monkeypatch.parse_release(installed)
            headline = f"Megatron {one}, compared with the installed Megatron {installed}"
        of_host = fixed(sources, *[tested] * newer)
        wanted = [*(seam for one in SEAMS.values() for seam in one), *of_core.values()]
        wanted += [seam for seam, _ in of_host.values() if seam not in wanted]
    else:
        parser.error(f"{given.checkout} contains neither megatron/core nor megatron/bridge")
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
        print(f"checked names that hooks read: {len(exact)} of modules and classes, {len(anywhere)} of other objects")
    for reason in reasons:
        print(f"does not fit: {reason}", file=sys.stderr)
    print("not all fit" if reasons else "all fit")
    return bool(reasons)


if __name__ == "__main__":
    sys.exit(main())
