"""README.md and docs/: what they name exists, links lead somewhere, lines are short, numbers are those of functions.
Docstrings: each stands under the one name that it describes."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from recover_megatron.launch.command_line.forecast import forecast
from recover_megatron.launch.command_line.script import Script
from recover_megatron.launch.command_line.spec import LaunchSpec
from recover_megatron.workload.domains import Loss, data_parallel_ranks_per_replica
from recover_megatron.workload.snapshots import interval
from tests.harness import REPOSITORY
from tests.harness import REPOSITORY as ROOT

GENERATED = sorted((ROOT / "docs" / "reference").glob("*.md"))
PAGES = sorted((ROOT / "docs").glob("*.md"))
TEXTS = [*sorted(ROOT.glob("*.md")), *PAGES]
"""The pages that are written by hand."""
SOURCES = {".py", ".sh", ".sbatch", ".yaml", ".patch", ".md", ".toml"}
WIDTH = 120
EXTENSIONS = r"(?:py|sh|sbatch|pml|patch|md|toml)"
OF_MEGATRON = {
    *("pretrain_gpt.py", "pretrain_hybrid.py", "pretrain_mamba.py", "pretrain_vlm.py", "train_rl.py"),
    *(f"examples/{script}.py" for script in ("t5/pretrain_t5", "bert/pretrain_bert", "multimodal/train")),
}
"""Scripts of a Megatron-LM checkout, which its wheel lacks."""


def each(texts: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", texts, ids=lambda page: str(page.relative_to(ROOT)))


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"(?ms)^```.*?^```$", "", page.read_text(encoding="utf-8"))


def code_spans(page: Path) -> Iterator[str]:
    for span in re.findall(r"`([^`]+)`", prose(page)):
        yield " ".join(span.split())


@cache
def files() -> frozenset[str]:
    """The repository's files and folders, relative to its root; what set-up and runs leave there is not among them."""
    skipped, of_the_root = {".git", ".venv", "__pycache__", "build", "dist"}, {"data", "runs"}
    names: set[str] = set()
    for folder, folders, inside in os.walk(ROOT):
        folders[:] = [
            name for name in folders if name not in (skipped | of_the_root if folder == str(ROOT) else skipped)
        ]
        names |= {str((Path(folder) / name).relative_to(ROOT)) for name in (*folders, *inside)}
    return frozenset(names)


def in_the_repository(name: str) -> bool:
    """Whether a file or folder is at ``name``, or ends with it: docs leave out the folders that go without saying."""
    name = name.rstrip("/")
    return any(path == name or path.endswith(f"/{name}") for path in files())


def in_megatron(name: str) -> bool:
    if name in OF_MEGATRON:
        return True
    folder, _, rest = name.removeprefix("megatron/").partition("/")
    found = importlib.util.find_spec(f"megatron.{folder}") if rest else None
    return found is not None and any((Path(place) / rest).exists() for place in found.submodule_search_locations or ())


@each(TEXTS)
def test_lines_are_short(page: Path) -> None:
    """A row of a table and a single word (a URL, say) cannot be broken; everything else can, output of programs too."""
    long = []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        indent = len(line) - len(line.lstrip())
        unbreakable = indent + max(map(len, line.split()), default=0)
        if len(line) > WIDTH and not line.lstrip().startswith("|") and unbreakable <= WIDTH:
            long.append(f"{page.name}:{number}: {len(line)} columns")
    assert not long, "\n".join(long)


@each(PAGES)
def test_a_page_begins_with_a_summary(page: Path) -> None:
    """A title, then a quote of one to four lines: what the page tells, and for whom."""
    title, empty, *lines = page.read_text(encoding="utf-8").splitlines()
    summary = [line for line in lines[: lines.index("")] if line.startswith("> ")]
    assert title.startswith("# ")
    assert not empty
    assert 1 <= len(summary) == lines.index("") <= 4, f"the summary is one quote of one to four lines: {summary}"


def test_the_overview_of_the_benchmarks_is_two_screens() -> None:
    assert len((ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8").splitlines()) <= 100


@each(TEXTS)
def test_files_that_are_named_exist(page: Path) -> None:
    ours = {Path(path).parts[0] for path in files() if "/" in path}
    ours |= {f"{path.name}" for path in (ROOT / "recover_megatron").iterdir() if path.is_dir()}
    missing = []
    for name in code_spans(page):
        a_file = re.fullmatch(rf"[\w./-]+\.{EXTENSIONS}", name)
        a_folder = re.fullmatch(r"[\w.-]+/[\w./-]*", name) and name.split("/")[0] in ours
        if (a_file or a_folder) and not (in_the_repository(name) or in_megatron(name)):
            missing.append(name)
    assert not missing, f"{page.name} names what is not there: {missing}"


@each(TEXTS)
def test_files_in_commands_exist(page: Path) -> None:
    folders = "scripts|benchmarks|examples|tests|models|patches"
    named = re.findall(rf"(?<![\w./-])(?:{folders})/[\w./-]+\.{EXTENSIONS}\b", page.read_text(encoding="utf-8"))
    missing = [name for name in named if name not in files() and name not in OF_MEGATRON]
    assert not missing, f"{page.name} names what is not there: {missing}"


@each(TEXTS)
def test_tests_that_are_named_exist(page: Path) -> None:
    """FILE::NAME, with parameters in brackets or without."""
    named = {
        tuple(span.split("[")[0].split("::")) for span in code_spans(page) if re.match(r"tests/[\w/]+\.py::", span)
    }
    missing = ["::".join(test) for test in sorted(named) if not a_test(*test)]
    assert not missing, f"{page.name} names what is not there: {missing}"


def a_test(file: str, name: str) -> bool:
    path = ROOT / file
    return path.is_file() and re.search(rf"(?m)^def {name}\(", path.read_text(encoding="utf-8")) is not None


def test_each_defect_has_tests_that_exist_or_says_why_it_has_none() -> None:
    defects = tomllib.loads((ROOT / "tests" / "defects.toml").read_text(encoding="utf-8"))["defect"]
    assert len(defects) >= 494
    for defect in defects:
        assert all(defect.get(key) for key in ("area", "what", "phase", "found_by")), defect
        assert bool(defect["tests"]) != bool(defect.get("no_test")), defect
        for test in defect["tests"]:
            assert re.fullmatch(r"tests/[\w/]+\.py::test_\w+", test), test
            assert a_test(*test.split("::")), f"there is no {test}"
    assert len({defect["what"] for defect in defects}) == len(defects)


@each(TEXTS)
def test_modules_that_are_named_exist(page: Path) -> None:
    """Dotted names, and the first column of tables whose head says ``module of ``PACKAGE/```."""
    text = page.read_text(encoding="utf-8")
    missing = [
        dotted
        for dotted in re.findall(r"\brecover_megatron\.[a-z]\w*", text)
        if not {f"{dotted.replace('.', '/')}.py", dotted.replace(".", "/")} & files()
    ]
    for package, rows in re.findall(r"(?m)^\| module of `([\w/]+)/` \|.*\n\|[-:| ]+\n((?:\|.*\n?)+)", text):
        for row in rows.splitlines():
            for module in re.findall(r"`(\w+)`", row.split("|")[1]):
                if not in_the_repository(f"recover_megatron/{package}/{module}.py"):
                    missing.append(f"{package}/{module}")
    assert not missing, f"{page.name} names what is not there: {missing}"


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    heads = re.findall(r"(?m)^#+ +(.*)$", prose(page))
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", head) for head in heads)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in plain}


def links(page: Path) -> Iterator[tuple[Path, str, str]]:
    """The page's links into the repository, entries of its tables of contents too: target, anchor, text of the link."""
    contents = "".join(re.findall(r"(?ms)^```\{toctree\}$(.*?)^```$", page.read_text(encoding="utf-8")))
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)) + re.findall(r"(?m)^([\w/-]+\.md)$", contents):
        if not re.match(r"https?://", link):
            name, _, anchor = link.partition("#")
            yield (page.parent / name).resolve() if name else page, anchor, link


@each([*TEXTS, *GENERATED])
def test_links_lead_somewhere(page: Path) -> None:
    broken = [
        link
        for target, anchor, link in links(page)
        if not target.exists() or (anchor and anchor not in anchors(target))
    ]
    assert not broken, f"{page.name} links to {broken}"


def test_pages_that_the_code_names_exist() -> None:
    """Pages of docs and their anchors, in sources, scripts, examples, patches and findings."""
    folders = ("recover_megatron", "scripts", "tests", "benchmarks", "examples", "patches", "findings")
    texts = (path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in SOURCES)
    broken = [
        f"{path.relative_to(ROOT)}: {name}{anchor}"
        for path in texts
        for name, anchor in re.findall(r"\b(docs/[\w/-]+\.md)(#[\w-]+)?", path.read_text(encoding="utf-8"))
        if not (ROOT / name).exists() or (anchor and anchor[1:] not in anchors(ROOT / name))
    ]
    assert not broken, "\n".join(broken)


def test_every_page_is_reached_from_the_readme() -> None:
    reached, ahead = set[Path](), [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        reached.add(page)
        ahead += {target for target, _, _ in links(page) if target.suffix == ".md" and target.exists()} - reached
    assert reached >= {*TEXTS, *GENERATED}


PAGE = (REPOSITORY / "docs" / "experts.md").read_text(encoding="utf-8")
PER_NODE = 8
ROWS = re.findall(r"(?m)^\| (\d+) \| T (\d+), P (\d+), EP (\d+)[^|]*\| (\d+) \| (\d+) \| ([^|]+) \| ([^|]+) \|$", PAGE)


def said(loss: Loss) -> str:
    end = "back when replaced" if loss.waits else f"{loss.whole} go {'back' if loss.back else 'on'}"
    return f"{loss.broken} broken, {end}"


def test_the_page_has_its_table() -> None:
    assert len(ROWS) == 11


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}-nodes-t{row[1]}-p{row[2]}-ep{row[3]}")
def test_each_layout_costs_what_the_table_says(row: tuple[str, ...]) -> None:
    nodes, tensor, pipeline, expert, size, replicas = map(int, row[:6])
    inner = data_parallel_ranks_per_replica(tensor=tensor, context=1, expert=expert, expert_tensor=1)
    assert inner * tensor * pipeline == size
    assert size * replicas == nodes * PER_NODE
    assert row[6] == ("all" if replicas == 1 else f"1/{replicas}")
    sizes = {"tensor-model": tensor, "pipeline-model": pipeline, "expert-model": expert, "expert-tensor": 1}
    flags = [text for name, value in sizes.items() for text in (f"--{name}-parallel-size", str(value))]
    script = Script.read("pretrain_gpt_recover.py", ["--recover", "--use-distributed-optimizer", *flags])
    found = forecast(LaunchSpec(nnodes=nodes, nproc_per_node=PER_NODE, script=script))
    assert found is not None
    assert {said(loss) for loss in found.losses} == {row[7]}


def test_the_only_replica_loses_as_many_iterations_as_it_says() -> None:
    between = interval(cost=1.0, behind=0.0, iteration=10.0, domains=32)
    assert f"taken every {between} iterations" in PAGE
    assert f"{-(-between // 2)} are lost on average" in PAGE


@pytest.mark.parametrize(("ranks", "experts", "replicas", "told"), [(64, 4, 2, "6.3 %"), (8, 1, 2, "21 %")])
def test_the_gain_of_the_smallest_unit_is_by_the_formula(ranks: int, experts: int, replicas: int, told: str) -> None:
    lost = (1 - (1 - 1 / ranks) / (1 + 0.5 / experts)) / replicas
    (row,) = [line for line in PAGE.splitlines() if f"(I {ranks}, h {experts}, R {replicas})" in line]
    assert row.endswith(f": {told}")
    assert float(told.split()[0]) == pytest.approx(100 * lost, abs=0.5 if "." not in told else 0.06)


def is_string(statement: ast.AST) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def strays(source: str) -> list[int]:
    """Lines of strings that describe nothing: between such a string and its name another one has been written."""
    bodies = [getattr(node, "body", None) for node in ast.walk(ast.parse(source))]
    return [
        after.lineno
        for body in bodies
        if isinstance(body, list)
        for before, after in pairwise(body)
        if is_string(after) and not isinstance(before, ast.Assign | ast.AnnAssign | ast.TypeAlias)
    ]


def test_a_docstring_stands_under_the_name_that_it_describes() -> None:
    assert strays('FIRST = 1\nSECOND = 2\n"""Of the second."""\n"""Of the first."""\n') == [4]
    sources = [*(ROOT / "recover_megatron").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")]
    assert {path.name: found for path in sources if (found := strays(path.read_text(encoding="utf-8")))} == {}
