"""Sphinx configuration of the documentation.

    python -m sphinx -W --keep-going -b html docs build/site

Pages are Markdown (myst-parser). ``sphinx.ext.apidoc`` and autodoc make the API reference from the docstrings: they
import every module and write docs/api. scripts/reference.py generates docs/reference, which is committed, so that
readers need no build.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from textwrap import indent
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import recover_megatron  # noqa: E402

project = "recover_megatron"
author = "The recover_megatron authors"
copyright = "The recover_megatron authors. Apache License 2.0"
version = release = recover_megatron.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.apidoc"]
exclude_patterns = ["data", "requirements.txt"]
suppress_warnings = ["misc.highlighting_failure"]  # console output in a code block cannot be highlighted as a program

myst_heading_anchors = 4
myst_number_code_blocks: list[str] = []

html_theme = "furo"
html_title = f"recover_megatron {release}"
html_show_sphinx = False

apidoc_modules = [
    {
        "path": "../recover_megatron",
        "destination": "api",
        "exclude_patterns": ["**/__main__.py", "**/shipped/**"],
        "separate_modules": False,
        "include_private": False,
        "module_first": True,
        "max_depth": 2,
        "automodule_options": {"members", "undoc-members", "show-inheritance"},
    }
]
toc_object_entries = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"ignore-module-all": True, "exclude-members": "__init__, __new__"}
autodoc_class_signature = "mixed"


def restructured(lines: list[str]) -> list[str]:
    """Return a docstring as reStructuredText: its drawings and tables, which are plain text, become literal blocks.

    A paragraph that is no list is a drawing if one of its lines is indented or has a gap of three columns.
    """
    made: list[str] = []
    for paragraph in "\n".join(lines).split("\n\n"):
        follows = bool(made) and made[-1].endswith("::")
        drawn = re.search(r"(?m)^ {2,}|\S {3,}\S", paragraph) and not re.match(r"\s*([*-]|\d\.) ", paragraph)
        if drawn and not follows:
            paragraph = "::\n\n" + indent(paragraph, "    ")
        elif not drawn:
            parts = re.split(r"(?s)(``.*?``)", paragraph)  # in literals an escape would be shown
            parts[::2] = [re.sub(r"[|]|(?<=\S)[*]|[*](?=\S)|(?<=\w)_(?!\w)", r"\\\g<0>", part) for part in parts[::2]]
            paragraph = "".join(parts)
        made.append(paragraph)
    return "\n\n".join(made).split("\n")


def setup(app: Any) -> None:
    """Connect the hook that prepares the docstrings; called by Sphinx."""

    def docstring(app: Any, what: str, name: str, item: object, options: object, lines: list[str]) -> None:
        lines[:] = restructured(lines)

    app.connect("autodoc-process-docstring", docstring)
