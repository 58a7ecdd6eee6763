"""Do the seams of recover_megatron fit a Megatron?  Its sources are read, not imported.

    python scripts/check_megatron.py CHECKOUT          # of Megatron-LM or Megatron-Bridge, or an unpacked wheel
    python scripts/check_megatron.py CHECKOUT --json   # the parameters, as tests/megatron_hooks/bridge_parameters.json

Of every function that is wrapped or replaced one line: it fits; it fits, but its body is not that of the Megatron that
is installed here (somebody is to read it); it does not fit.  Then what is read by its name: of modules and classes each
name where it is looked for, of other objects whether the name is still anywhere.  The functions that the host device
changes are listed, too: a fix that does not fit ends every run without a GPU.  Exit code 0: all fit; 1: what does not
is named, with the reason.
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
"""Module and node of a definition.  A module has an empty node, and so has what comes from where no sources are."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Sources:
    """``root``: the folder that holds ``megatron/``."""

    root: Path
    _trees: dict[str, ast.Module | None] = field(default_factory=dict)
    _known: dict[tuple[str, str], Found | None] = field(default_factory=dict)

    def tree(self, module: str) -> ast.Module | None:
        """None where there is none; of a folder without ``__init__.py`` an empty one."""
        if module not in self._trees:
            path = self.root.joinpath(*module.split("."))
            files = [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]
            empty = ast.Module([], []) if path.is_dir() else None
            self._trees[module] = ast.parse(files[0].read_text(encoding="utf-8")) if files else empty
        return self._trees[module]

    def find(self, module: str, name: str) -> Found | None:
        """What ``module`` knows by ``name``, which may have dots; None: nothing."""
        head, _, rest = name.partition(".")
        if (module, head) not in self._known:
            self._known[module, head] = None  # while it is looked for: modules import each other
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
        """Its definition; another node where it comes from elsewhere, None: there is none."""
        found = self.find(seam.module, seam.name)
        if found is None and seam.formerly:
            found = self.find(seam.module, f"{seam.formerly}.{seam.name.rpartition('.')[2]}")
        return found and found[1]

    def body(self, seam: Seam) -> str:
        """What the function takes and does, as text that can be compared."""
        node = self.function(seam)
        if not isinstance(node, Function):
            return ""
        return "\n".join(map(ast.dump, [node.args, *node.body[ast.get_docstring(node) is not None :]]))

    def words(self) -> set[str]:
        """All names in its code, and all flags as names."""
        texts = (path.read_text(encoding="utf-8") for path in sorted(self.root.glob("megatron/[ct]*/**/*.py")))
        return {word.lstrip("-").replace("-", "_") for text in texts for word in re.findall(r"--[a-z0-9-]+|\w+", text)}


def _flat(node: ast.AST) -> Iterator[ast.AST]:
    """All that is executed with the module or class."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, Function | ast.ClassDef):
            yield from _flat(child)


def _defines(node: ast.AST) -> str:
    """The name of a function or class, or of what is set."""
    if isinstance(node, Function | ast.ClassDef):
        return node.name
    is_set = isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store)
    return str(getattr(node, "id", None) or getattr(node, "attr", "")) if is_set else ""


def signatures(sources: Sources, wanted: Sequence[Seam]) -> dict[str, list[str] | None]:
    """Each function that is wrapped -> its parameters; none of what comes from elsewhere, None: there is none."""
    found = {}
    for seam in wanted:
        node = sources.function(seam)
        its = node.args if isinstance(node, Function) else ast.arguments([], [], None, [], [], None, [])
        names = [each.arg for each in (*its.posonlyargs, *its.args, *its.kwonlyargs)]
        found[f"{seam.module}.{seam.name}"] = None if node is None else names
    return found


def misfits(found: dict[str, list[str] | None], wanted: Sequence[Seam]) -> dict[str, str]:
    """What does not fit -> why.  What comes from elsewhere is checked where it is imported: at the start."""
    reasons = {}
    for name, seam in ((f"{seam.module}.{seam.name}", seam) for seam in wanted):
        its = found[name]
        why = f"there is no {name}" if its is None and not seam.optional else None
        reasons[name] = unlike(name, its, seam.parameters, seam.named) if its else why
    return {name: why for name, why in reasons.items() if why}


def fixed(*versions: Sources) -> dict[str, tuple[Seam, str | None]]:
    """Each function that a fix of the host device expects -> where it is, its parameters between blanks (None: any).

    A fix of a module that none of ``versions`` has is left out.
    """
    return {
        f"{fix.module_name}.{name}": (Seam(fix.module_name, name), parameters)
        for fix in FIXES.values()
        for name, parameters in fix.expects.items()
        if any(version.tree(fix.module_name) for version in versions)
    }


def unfixable(found: dict[str, list[str] | None], wanted: dict[str, tuple[Seam, str | None]]) -> dict[str, str]:
    """Functions that the host device cannot change -> why."""
    return {
        name: f"{name} takes ({', '.join(its)}), the host device expects ({', '.join(parameters.split())})"
        for name, (_, parameters) in wanted.items()
        if (its := found[name]) and parameters is not None and its != parameters.split()
    }


def reads(tested: Sources) -> tuple[set[tuple[str, str]], set[str]]:
    """What the hooks read of Megatron by name: (module, name) where that is known, else names alone.

    As far as ``tested`` has them: others are asked for where a version may have them.
    """
    exact, anywhere, ours = set(), set(), set()
    for file in sorted(PACKAGE.rglob("*.py")):
        nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        ours |= {its.arg if isinstance(its, ast.arg) else _defines(its) for its in nodes if not hasattr(its, "attr")}
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
    return {its for its in exact if tested.find(*its)}, {name for name in anywhere - ours if name in words}


def _asked(node: ast.AST) -> tuple[str, list[str]]:
    """Of which object this reads or sets which attributes, if any."""
    if isinstance(node, ast.Attribute):
        return ast.unparse(node.value), [node.attr]
    if isinstance(node, ast.Call) and node.args:
        name, of = ast.unparse(node.func), ast.unparse(node.args[0])
        if name in ("getattr", "hasattr") and isinstance(node.args[1], ast.Constant):
            return of, [str(node.args[1].value)]
        if name.endswith("replaced"):
            return of, [its.arg for its in node.keywords if its.arg]
    return "", []


def main() -> int:
    """Print what fits and what does not."""
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
        from recover_megatron.megatron_hooks.loop.bridge import seams  # imports Megatron, which takes its time

        wanted = seams()
    elif (root / "megatron" / "core").is_dir():
        of_core = monkeypatch.ENTRY | monkeypatch.SEAMS | monkeypatch.FSDP_SEAMS
        said = "no Megatron is installed here: nothing is compared"
        if spec and spec.origin:
            tested = Sources(Path(spec.origin).parents[2])
            files = (one.root / "megatron/core/package_info.py" for one in (sources, tested))
            its, installed = map(monkeypatch.read_version, files)
            newer = monkeypatch.parse_release(its) >= monkeypatch.parse_release(installed)
            said = f"Megatron {its}, compared with {installed}"
        of_host = fixed(sources, *[tested] * newer)
        wanted = [*(seam for its in SEAMS.values() for seam in its), *of_core.values()]
        wanted += [seam for seam, _ in of_host.values() if seam not in wanted]
    else:
        parser.error(f"{given.checkout} has neither megatron/core nor megatron/bridge")
    found = signatures(sources, wanted)
    why = misfits(found, wanted) | unfixable(found, of_host)
    if given.json:
        print(json.dumps({name: " ".join(its or ()) for name, its in found.items()}, indent=1))
        return bool(why)
    if not is_bridge:
        print(said)
    for name, seam in zip(found, wanted, strict=True):
        changed = tested.body(seam) and sources.body(seam) != tested.body(seam)
        how = "does not fit" if name in why else "fits, its body changed" if changed else "fits"
        print(f"{how:24}{name}")
    reasons = list(why.values())
    if newer:
        exact, anywhere = reads(tested)
        reasons += [f"there is no {'.'.join(its)}" for its in sorted(exact) if sources.find(*its) is None]
        reasons += [f"nothing is called {name} any more" for name in sorted(anywhere - sources.words())]
        print(f"read by name: {len(exact)} of modules and classes, {len(anywhere)} of other objects")
    for reason in reasons:
        print(f"does not fit: {reason}", file=sys.stderr)
    print("not all fit" if reasons else "all fit")
    return bool(reasons)


if __name__ == "__main__":
    sys.exit(main())
