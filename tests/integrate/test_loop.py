"""A training loop is taken if everything that is wrapped in it is what we know, and refused with all that is not."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from recover_megatron.errors import UserError
from recover_megatron.integrate import INTERFACE, ROLES, Loop, Role, Seam
from tests.harness import REPOSITORY


def step(model: Any, data: Any) -> str:
    return f"step of {model} with {data}"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = ModuleType("loop_of_a_test")
    made.step = step  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "loop_of_a_test", made)
    return made


class Services:
    def operations(self, samples: int) -> float:
        return 0.0

    def finish_saves(self) -> None: ...

    def forget(self) -> None: ...


def loop(*parameters: str, **changes: Any) -> Loop:
    every = {role.name: [Seam("loop_of_a_test", "step", parameters)] for role in ROLES if role.required}
    return replace(Loop("Ours", "supported: 1", every, Services()), **changes)


def test_a_loop_whose_functions_are_known_is_taken(module: ModuleType) -> None:
    loop("model", "data").check()
    loop("model").check()  # a later version may have more


def test_everything_that_does_not_fit_is_told_at_once(module: ModuleType) -> None:
    seams = {"train": [Seam("loop_of_a_test", "train")], "log": [Seam("nowhere.loop", "log")], "sing": []}
    with pytest.raises(UserError) as refused:
        Loop("Ours", "supported: 1", {**loop("data").seams, **seams}, Services()).check()
    assert "--recover: Ours: role sing does not exist (supported: 1)" in refused.value.reasons
    assert "--recover: Ours: loop_of_a_test.train does not exist (supported: 1)" in refused.value.reasons
    assert "--recover: Ours: module nowhere.loop does not exist (supported: 1)" in refused.value.reasons
    takes = "loop_of_a_test.step takes (model, data), expected (data, ...)"
    assert f"--recover: Ours: {takes} (supported: 1)" in refused.value.reasons


def test_a_loop_that_leaves_out_what_is_needed_is_refused(module: ModuleType) -> None:
    given = dict(loop("model").seams)
    del given["train_step"]
    assert replace(loop("model"), seams=given).misfits() == ["it has no seam for role train_step"]


def test_a_loop_for_another_version_of_the_interface_is_refused(module: ModuleType) -> None:
    reasons = loop("model", interface=INTERFACE + 1).misfits()
    assert reasons == [f"it needs version {INTERFACE + 1} of recover_megatron.integrate, this is version {INTERFACE}"]


def test_a_wrapper_is_called_as_its_role_says_whatever_the_loop_takes(module: ModuleType) -> None:
    def adapt(wrapper: Any) -> Any:
        def adapted(original: Any) -> Any:
            return lambda model, data: wrapper(lambda data, model: original(model, data))(data, model)

        return adapted

    ours = loop(seams={"train_step": [Seam("loop_of_a_test", "step", ("model", "data"), adapt=adapt)]})
    ours.wrap("train_step", lambda original: lambda data, model: original(data.upper(), model))
    assert module.step("GPT", "text") == "step of GPT with TEXT"
    ours.wrap("train", lambda original: original)  # nothing to wrap


def test_a_function_that_a_version_may_lack_is_wrapped_where_it_is(module: ModuleType) -> None:
    later = Seam("loop_of_a_test", "later", optional=True)
    assert later.misfit() is None
    later.wrap(lambda original: original, "supported: 1")
    assert not hasattr(module, "later")


def test_a_method_is_wrapped_in_its_class_which_older_versions_may_have_by_another_name(module: ModuleType) -> None:
    class Old:
        def train(self, model: str) -> str:
            return f"trained {model}"

    module.Old = Old  # type: ignore[attr-defined]
    seam = Seam("loop_of_a_test", "New.train", ("self", "model"))
    assert seam.misfit() == "loop_of_a_test.New does not exist"
    assert Seam("loop_of_a_test", "New.train", optional=True).misfit() is None
    assert Seam("loop_of_a_test", "Old.stop", optional=True).misfit() == "Old.stop does not exist"
    known = replace(seam, formerly="Old")
    assert known.misfit() is None
    known.wrap(lambda original: lambda self, model: original(self, model.upper()), "supported: 1")
    assert Old().train("gpt") == "trained GPT"


PAGE = (REPOSITORY / "docs" / "reference" / "loop_roles.md").read_text(encoding="utf-8")
GUIDE = (REPOSITORY / "docs" / "integrate.md").read_text(encoding="utf-8")


def row(role: Role) -> str:
    call = f"`{role.name}({', '.join([*role.parameters, '...'])})`"
    return f"| {call} | {'yes' if role.required else ''} | {role.when.replace('``', '`')} |"


def test_the_page_has_every_role_in_order() -> None:
    assert "\n".join(row(role) for role in ROLES) in PAGE


def test_the_page_has_the_version() -> None:
    assert f"version {INTERFACE}." in PAGE
    assert f"it is {INTERFACE}." in GUIDE
