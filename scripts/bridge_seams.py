"""Do the seams that recover_megatron wraps in Megatron-Bridge fit a release of it?  Its sources are read, not imported.

    python scripts/bridge_seams.py SOURCE             # a checkout of Megatron-Bridge, or an unpacked wheel of it
    python scripts/bridge_seams.py SOURCE --json      # what tests/megatron_hooks/bridge_parameters.json has of it

Exit code 0: all fit; 1: what does not is named.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from pathlib import Path

from recover_megatron import __version__
from recover_megatron.integrate import Seam


def parameters(root: Path, module: str, name: str) -> list[str] | None:
    """Of the function that ``module`` knows by ``name``; empty where it is Megatron-Core's, None: there is none."""
    path = root.joinpath(*module.split("."))
    file = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
    if not file.is_file():
        return None
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name == name and node.col_offset == 0:
            its = node.args
            return [each.arg for each in (*its.posonlyargs, *its.args, *its.kwonlyargs)]
        if isinstance(node, ast.ImportFrom) and node.module and name in [alias.name for alias in node.names]:
            return parameters(root, node.module, name) if node.module.startswith("megatron.bridge") else []
    return None


def signatures(root: Path, wanted: list[Seam]) -> dict[str, list[str] | None]:
    """Each function that is wrapped -> its parameters."""
    return {f"{seam.module}.{seam.name}": parameters(root, seam.module, seam.name) for seam in wanted}


def misfits(found: dict[str, list[str] | None], wanted: list[Seam]) -> list[str]:
    """What does not fit, in words.  Functions of Megatron-Core are checked where they are imported: at the start."""
    reasons = []
    for seam in wanted:
        name = f"{seam.module}.{seam.name}"
        its = found.get(name)
        if its is None:
            reasons.append(f"there is no {name}")
        elif its and (tuple(its[: len(seam.parameters)]) != seam.parameters or not set(seam.named) <= set(its)):
            reasons.append(f"{name} takes ({', '.join(its)}), expected ({', '.join(seam.parameters)}, ...)")
    return reasons


def main() -> int:
    """Print the signatures, or what does not fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument("source", type=Path)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    root = given.source / "src" if (given.source / "src" / "megatron" / "bridge").is_dir() else given.source
    if not (root / "megatron" / "bridge").is_dir():
        parser.error(f"{given.source} has no megatron/bridge: name a checkout of Megatron-Bridge, or an unpacked wheel")
    from recover_megatron.megatron_hooks.loops.bridge import seams  # imports Megatron, which takes its time

    found = signatures(root, seams())
    if given.json:
        print(json.dumps({name: " ".join(its or ()) for name, its in found.items()}, indent=1))
    reasons = misfits(found, seams())
    for reason in reasons:
        print(reason, file=sys.stderr)
    if not reasons and not given.json:
        print(f"all {len(found)} seams fit")
    return bool(reasons)


if __name__ == "__main__":
    sys.exit(main())
