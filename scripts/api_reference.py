#!/usr/bin/env python3
"""Write the API reference: an HTML page for each module of recover_megatron, made from its docstrings by pdoc.

    .venv/bin/python scripts/api_reference.py [FOLDER]      default: build/api; open FOLDER/index.html

Every module is imported, so it needs what training needs.  Exit status: 0; 1 where pdoc had a warning, told on stderr.
"""

from __future__ import annotations

import argparse
import inspect
import pkgutil
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pdoc.doc
import pdoc.render

import recover_megatron

ROOT = Path(__file__).resolve().parents[1]
PDOC = Path(pdoc.__file__).parent


def modules() -> list[str]:
    """The names of all modules but the commands; pdoc by itself leaves out those that an ``__all__`` does not name."""
    inside = pkgutil.walk_packages(recover_megatron.__path__, "recover_megatron.")
    return ["recover_megatron", *(module.name for module in inside if not module.name.endswith(".__main__"))]


def resolvable(module: ModuleType) -> None:
    """Have pdoc find two kinds of names in annotations, which it looks up in the module that a function says it is of:
    a class's type parameters, and what the constructor of a NamedTuple uses, which says that it is of none."""
    for item in list(vars(module).values()):
        if inspect.isclass(item) and item.__module__ == module.__name__:
            if issubclass(item, tuple):
                item.__new__.__module__ = module.__name__
            for parameter in item.__type_params__:
                vars(module).setdefault(parameter.__name__, parameter)


def write(folder: Path) -> list[str]:
    """Write all pages; returns pdoc's warnings."""
    pdoc.render.configure(docformat="restructuredtext", show_source=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        documented = {name: pdoc.doc.Module.from_name(name) for name in modules()}
        for module in documented.values():
            resolvable(module.obj)
        for name, module in documented.items():
            page = folder / f"{name.replace('.', '/')}.html"
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text(pdoc.render.html_module(module, documented), encoding="utf-8")
        (folder / "index.html").write_text(pdoc.render.html_index(documented), encoding="utf-8")
        (folder / "search.js").write_text(pdoc.render.search_index(documented), encoding="utf-8")
    return [str(warning.message) for warning in caught if PDOC in Path(warning.filename).parents]


def main() -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(description="Write the API reference of recover_megatron, as HTML.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {recover_megatron.__version__}")
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "build" / "api", help="default: build/api")
    folder = parser.parse_args().folder
    said = write(folder)
    for warning in said:
        print(f"api_reference: {warning}", file=sys.stderr)
    print(folder / "index.html")
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
