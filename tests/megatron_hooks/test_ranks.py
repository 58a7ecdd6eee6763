"""Each place where Megatron asks which rank or data-parallel rank it is, or how many there are: known to be safe.

After a death the ranks are renumbered.  A loop that makes something once for "whoever is rank 0" and uses it later by
"who is rank 0 now" ends every next rank 0 in turn.  So somebody has read each place, and ``ranks.toml`` says why it is
safe.  A place that is new or has changed is to be read, and mended or added there.

With MEGATRON_LM_CHECKOUTS=/path/to/core_v0.18.2:/path/to/core_v0.19.0 these are read, too, beside the installed one.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from megatron import core

INSTALLED = Path(core.__file__).parents[2]
CHECKOUTS = [Path(path) for path in os.environ.get("MEGATRON_LM_CHECKOUTS", "").split(":") if path]
LIST = Path(__file__).with_name("ranks.toml")

ASKS = {
    "get_rank", "get_world_size", "get_global_rank", "safe_get_rank", "_safe_get_rank", "get_rank_safe",
    "safe_get_world_size", "is_last_rank", "is_rank0", "get_data_parallel_rank", "get_expert_data_parallel_rank",
}  # fmt: skip
"""Functions that say it.  Those that print on one rank (``print_rank_0``) ask when they print, each time."""

MAY_ASK = re.compile(rb"\b(?:" + "|".join(sorted(ASKS)).encode() + rb"|args(?:\(\))?\.rank|RANK)\b")

LEFT_OUT = (
    "core.inference", "core.export", "core.post_training", "core.resharding", "core.tokenizers", "core.models.mimo",
    "core.pipeline_parallel.bridge_communicator", "core.pipeline_parallel.multimodule_communicator",
    "core.distributed.fsdp.src.docs",
)  # fmt: skip
"""What no training with --recover comes to."""


def places(root: Path) -> set[tuple[str, str]]:
    """(module:function, the text of the expression or statement that asks) of the Megatron in ``root``."""
    found = set()
    for path in root.glob("megatron/[ct]*/**/*.py"):
        module = ".".join(path.relative_to(root / "megatron").with_suffix("").parts)
        if module.startswith(("core.", "training.")) and not module.startswith(LEFT_OUT):
            source = path.read_bytes()
            if MAY_ASK.search(source):
                asking = Asking(source)
                found |= {(f"{module}:{function}", text) for function, text in asking.found}
    return found


class Asking(ast.NodeVisitor):
    """Finds what asks in one module."""

    def __init__(self, source: bytes) -> None:
        self.found: set[tuple[str, str]] = set()
        self._lines = source.splitlines(keepends=True)
        self._function: list[str] = []
        self._within: ast.AST | None = None
        self.visit(ast.parse(source))

    def generic_visit(self, node: ast.AST) -> None:
        named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if named:
            self._function.append(node.name)
        if _asks(node):
            self.found.add((".".join(self._function), self._text(self._within or node)))
        around = self._within
        for child in ast.iter_child_nodes(node):
            begins = isinstance(child, ast.stmt) or hasattr(node, "body")  # of what has a body: its condition alone
            within = child if begins else around or child
            self._within = within if hasattr(within, "lineno") else None
            self.visit(child)
        self._within = around
        if named:
            self._function.pop()

    def _text(self, node: Any) -> str:
        lines = self._lines[node.lineno - 1 : node.end_lineno]
        lines[-1] = lines[-1][: node.end_col_offset]
        lines[0] = lines[0][node.col_offset :]
        return " ".join(b"".join(lines).decode().split())


def _asks(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return getattr(node.func, "attr", getattr(node.func, "id", "")) in ASKS
    if isinstance(node, ast.Attribute):
        return node.attr == "rank" and ast.unparse(node.value) in ("args", "get_args()")
    return isinstance(node, ast.Constant) and node.value == "RANK"


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:6]


def known() -> set[tuple[str, str]]:
    """(place, digest of its text) of all that were read."""
    groups = tomllib.loads(LIST.read_text(encoding="utf-8")).values()
    return {(place, each) for group in groups for place, digests in group["places"].items() for each in digests.split()}


def unread(found: set[tuple[str, str]]) -> list[str]:
    """Digest, place and text of what is not in the list."""
    read = known()
    return sorted(f"{digest(text)} {place}: {text}" for place, text in found if (place, digest(text)) not in read)


@pytest.mark.parametrize("root", [INSTALLED, *CHECKOUTS], ids=lambda root: root.name)
def test_each_place_where_megatron_asks_for_its_rank_was_read(root: Path) -> None:
    found = places(root)
    assert len(found) > 150, "the sources were not found"
    left = unread(found)
    assert not left, "read these, and add them to ranks.toml where they are safe:\n" + "\n".join(left)


@pytest.mark.parametrize(
    ("text", "asking"),
    [
        ("def train():\n    kept = get_rank() == 0", "kept = get_rank() == 0"),
        (
            "def train():\n    if (args.profile\n        and args.rank in ranks): f()",
            "args.profile and args.rank in ranks",
        ),
        ("def train(writes=is_last_rank()):\n    pass", "is_last_rank()"),
        ("def train():\n    with f(), g(dist.get_world_size()):\n        pass", "g(dist.get_world_size())"),
    ],
)
def test_the_text_of_a_place_is_what_asks_and_not_what_is_around_it(text: str, asking: str, tmp_path: Path) -> None:
    (tmp_path / "megatron/training").mkdir(parents=True)
    (tmp_path / "megatron/training/training.py").write_text(text)
    assert places(tmp_path) == {("training.training:train", asking)}


def test_a_place_that_nobody_has_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "megatron/training").mkdir(parents=True)
    file = tmp_path / "megatron/training/training.py"
    file.write_text("def train():\n    if torch.distributed.get_rank() == 0:\n        prof.step()")
    assert unread(places(tmp_path)) == ["1802b8 training.training:train: torch.distributed.get_rank() == 0"]
