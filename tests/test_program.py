"""The description of a program names what decides on a training's numbers, and nothing that differs between hosts."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from recover_megatron import program
from recover_megatron.program import describe, differences


@pytest.fixture(autouse=True)
def another_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' own files lie in the real one."""
    monkeypatch.setattr("recover_megatron.program.tempfile", SimpleNamespace(gettempdir=lambda: "/nowhere"))


def module(name: str, path: Path | str | None, version: str = "") -> ModuleType:
    made = ModuleType(name)
    if isinstance(path, Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_text(f"name = {name!r}\n")
    if path is not None:
        made.__file__ = str(path)
    if version:
        made.__version__ = version  # type: ignore[attr-defined]
    return made


def described(*modules: ModuleType) -> dict[str, str]:
    found = describe({each.__name__: each for each in modules})
    found.pop("package Python")
    return found


def test_the_script_and_its_modules_go_by_name_wherever_they_lie(tmp_path: Path) -> None:
    here, there = (
        described(
            module("__main__", tmp_path / host / "train.py"),
            module("net", tmp_path / host / "net" / "__init__.py"),
            module("net.layers", tmp_path / host / "net" / "layers.py"),
        )
        for host in ("one", "other")
    )
    assert set(here) == {"script train.py", "net/__init__.py", "net/layers.py"}
    assert here == there


def test_an_installed_script_differs_by_its_text_and_not_by_the_environment_it_is_installed_in(tmp_path: Path) -> None:
    scripts = [tmp_path / host / "bin" / "pretrain" for host in ("one", "other", "third")]
    for script, text in zip(scripts, ("main()", "main()", "main(2)"), strict=True):
        script.parent.mkdir(parents=True)
        script.write_text(f"#!{script.parent}/python3\n{text}\n")
    one, other, third = (described(module("__main__", script)) for script in scripts)
    assert one == other
    assert differences(third, one) == (["the content of script pretrain differs"], [])


def test_a_module_named_like_the_script_is_another_one(tmp_path: Path) -> None:
    found = described(module("__main__", tmp_path / "train.py"), module("train", tmp_path / "lib" / "train.py"))
    assert set(found) == {"script train.py", "train.py"}


def test_a_module_that_is_an_object_of_the_program_ends_nothing(tmp_path: Path) -> None:
    class Lazy(ModuleType):
        @property
        def __dict__(self) -> dict[str, object]:  # type: ignore[override]
            raise ImportError("no such package")

        def __getattr__(self, name: str) -> object:
            raise ImportError("no such package")

    main = module("__main__", tmp_path / "train.py")
    assert set(described(Lazy("lazy"), Lazy("torch"), module("odd", "/a\0b.py"), main)) == {"script train.py"}


def test_an_edited_file_is_named(tmp_path: Path) -> None:
    modules = module("__main__", tmp_path / "train.py"), module("net", tmp_path / "net.py")
    before = described(*modules)
    (tmp_path / "net.py").write_text("width = 3\n")
    assert differences(described(*modules), before) == (["the content of net.py differs"], [])


def test_what_only_one_has_loaded_is_no_difference(tmp_path: Path) -> None:
    main, late = module("__main__", tmp_path / "train.py"), module("late", tmp_path / "late.py")
    assert differences(described(main), described(main, late)) == ([], [])
    assert differences(described(main, late), described(main)) == ([], [])


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("json", "json.py"),
        ("_sysconfigdata__host", "lib/site-packages/_sysconfigdata__host.py"),
        ("requests", "lib/python3.12/site-packages/requests.py"),
        ("apt", "python3/dist-packages/apt.py"),
        ("sitecustomize", "sitecustomize.py"),
        ("net._version", "net/_version.py"),
        ("net.version", "net/version.py"),
        ("kernels", "kernels.so"),
        ("bare", "bare.pyc"),
        ("__mp_main__", "train.py"),
    ],
)
def test_what_may_differ_between_hosts_is_not_described(tmp_path: Path, name: str, path: str) -> None:
    assert described(module(name, tmp_path / path)) == {}


@pytest.mark.parametrize("package", ["megatron", "recover_megatron"])
def test_megatron_and_this_package_are_described_where_they_are_installed(tmp_path: Path, package: str) -> None:
    its = module(f"{package}.core", tmp_path / "site-packages" / package / "core.py")
    assert set(described(its)) == {f"{package}/core.py"}


def test_generated_modules_are_not_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(tmp_path / "tmp")
    monkeypatch.setattr("recover_megatron.program.tempfile", SimpleNamespace(gettempdir=lambda: folder))
    script, generated = module("__main__", tmp_path / "train.py"), module("made", tmp_path / "tmp" / "made.py")
    assert set(described(script, generated)) == {"script train.py"}
    copied = module("__main__", tmp_path / "tmp" / "job" / "train.py")
    assert set(described(copied, generated)) == {"script train.py", "made.py"}, (
        "a job that is copied there is described"
    )


def test_a_module_without_a_readable_source_is_left_out(tmp_path: Path) -> None:
    class Odd(ModuleType):
        def __getattr__(self, name: str) -> str:
            raise AssertionError("a module that imports others when it is asked is not asked")

    large = module("large", tmp_path / "large.py")
    (tmp_path / "large.py").write_text("#" * (3 << 20))
    gone = module("gone", str(tmp_path / "gone.py"))
    assert described(module("__main__", None), large, gone, Odd("odd")) == {}


@pytest.mark.parametrize(
    ("name", "mine", "theirs", "refuses", "warns"),
    [
        ("torch", "2.15.0", "2.14.1", ["torch 2.15.0 (the run: 2.14.1)"], []),
        ("torch", "2.15.1+cu132", "2.15.0", [], ["torch 2.15.1 (the run: 2.15.0)"]),
        ("torch", "2.15.0+cu132", "2.15.0+cpu", [], []),
        ("megatron.core", "0.19.2", "0.18.2", ["megatron.core 0.19.2 (the run: 0.18.2)"], []),
        ("megatron.core", "0.19.2+d2d74a39", "0.19.2+956f325a", [], []),
        ("numpy", "3.0.0", "2.5.5", [], ["numpy 3.0.0 (the run: 2.5.5)"]),
        ("requests", "3.0.0", "2.5.5", [], []),
    ],
)
def test_another_release_refuses_another_patch_warns(
    name: str, mine: str, theirs: str, refuses: list[str], warns: list[str]
) -> None:
    one, other = (described(module(name, None, version)) for version in (mine, theirs))
    assert differences(one, other) == (refuses, warns)


def test_a_file_that_is_edited_while_a_prepared_process_waits_is_described_as_it_was_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, late = (module(name, tmp_path / f"{name}.py") for name in ("net", "late"))
    monkeypatch.setattr(program, "_remembered", {})
    monkeypatch.setitem(sys.modules, "net", loaded)
    before = described(loaded, late)
    program.remember()
    for edited in (loaded, late):
        Path(str(edited.__file__)).write_text("edited = True\n")
    monkeypatch.setitem(sys.modules, "late", late)  # it is imported when the process has become a worker
    now = program.describe()
    assert now["net.py"] == before["net.py"]
    assert now["late.py"] == described(late)["late.py"] != before["late.py"]


def test_this_process_is_described() -> None:
    found = describe()
    assert found["package Python"] == sys.version.split()[0]
    assert "recover_megatron/program.py" in found
    assert not any(name.startswith(("_pytest/", "os.", "torch/")) for name in found)
