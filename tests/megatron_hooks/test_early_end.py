"""What a sys.exit() of Megatron's, or of the user's, means: the end of the training, or that it cannot go on."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.training import global_vars, training
from megatron.training.utils import common_utils

from recover_megatron.integrate import Loop, Seam
from recover_megatron.megatron_hooks.entry.fault_tolerance import FaultTolerance
from recover_megatron.megatron_hooks.entry.program import HANDLERS, EndedEarly
from recover_megatron.megatron_hooks.loops.megatron_lm import MEGATRON_LM


def train(then: Callable[[], Any] = sys.exit) -> None:
    """A loop's."""
    then()


def read_metadata(tracker_filename: str, rank: int = 0) -> None:
    sys.exit(rank)


MINE = Loop("mine", "", {"train": [Seam(__name__, "train")]}, None)  # type: ignore[arg-type]


def ended(call: Callable[[], Any], *, begun: bool = True) -> None:
    """What becomes of a worker whose pretrain() is ``call``."""
    worker = FaultTolerance.__new__(FaultTolerance)
    worker.__dict__.update(_newcomer=False, _loop=MINE, _training=SimpleNamespace(begun=begun))
    worker._train_wherever_wanted(call, lambda: None)


def test_a_loop_that_exits_has_been_asked_to_also_where_it_is_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    original = train
    monkeypatch.setattr(sys.modules[__name__], "train", functools.wraps(original)(lambda: original()))
    ended(train)


def test_an_exit_that_nobody_asked_for_is_an_error_that_says_where_and_of_what() -> None:
    told = rf"by read_metadata\(tracker_filename='/x/latest.txt'\), {__name__} line \d+"
    for at in (lambda: read_metadata("/x/latest.txt"), lambda: train(lambda: read_metadata("/x/latest.txt"))):
        with pytest.raises(EndedEarly, match=told):
            ended(at)


def test_an_exit_with_a_code_keeps_it() -> None:
    with pytest.raises(SystemExit, match="3"):
        ended(lambda: read_metadata("", rank=3))


def test_a_training_without_data_is_no_training() -> None:
    ended(lambda: None)
    with pytest.raises(EndedEarly, match="no data to train with"):
        ended(lambda: None, begun=False)


def test_megatron_ends_its_training_as_is_assumed() -> None:
    """Its train() calls sys.exit() itself, and so do its handlers, which are where they are looked for."""
    (seam,) = MEGATRON_LM.seams["train"]
    assert exits(getattr(seam.owner(), seam.name))
    for name in HANDLERS:
        modules = (global_vars, common_utils, training)
        (handler,) = {getattr(module, name) for module in modules if hasattr(module, name)}
        assert exits(handler)
        for how in ("sys.exit(0)", "exit()"):
            namespace: dict[str, Any] = {"__name__": handler.__module__}
            exec(f"import sys\ndef {name}():\n    {how}", namespace)
            ended(namespace[name], begun=False)


def exits(function: Callable[..., Any]) -> bool:
    """Whether it calls sys.exit() itself."""
    tree = ast.parse(inspect.getsource(inspect.unwrap(function)))
    return any(isinstance(node, ast.Call) and ast.unparse(node.func) in ("sys.exit", "exit") for node in ast.walk(tree))
