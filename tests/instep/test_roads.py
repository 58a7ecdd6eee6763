"""Two ways through the code, as docs list them: of a gradient (instep.md), of the training thread after a death
(architecture.md).  Their calls are those of a run, in which worker 0 records its own."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest

from tests.harness import REPOSITORY
from tests.harness.forkserver import ForkServer
from tests.instep.calls import Call, read
from tests.instep.runs import Case, Layout, Strike

pytestmark = pytest.mark.slow

DP3 = Layout("dp3-overlap", 3, flags="--overlap-grad-reduce --ddp-bucket-size 2000")
DEATH = 3
"""The iteration in which another worker dies.  In the one before, nobody does, and all rings are open."""
LAST_GRADIENT, COMMITTED = "start_grad_sync", "MegatronTrainer.finish"
"""Between the first calls of these two, the table of a gradient's way has every file."""
LAST_OF_A_THREAD = ("ProgressThread.submit", "Ledger.mark")
"""In the table the training thread goes on to the ring's after the first of these, and back after the second."""
OF_A_GRADIENT, OF_A_DEATH = ("instep", "megatron_hooks", "collectives"), ("instep", "megatron_hooks")
"""The packages whose files the lists have; calls into others are not followed."""


@dataclass(frozen=True)
class Step:
    """A function of a list; ``depth``: below which of those before it, ``into``: a package that it calls."""

    file: str
    function: str
    depth: int = 0
    into: str = ""


@dataclass(frozen=True)
class Road:
    """A list of the docs: functions in the order of their calls, and files that are entered beside them."""

    steps: tuple[Step, ...]
    beside: frozenset[str]

    @property
    def files(self) -> set[str]:
        return {step.file for step in self.steps}


def section(page: str, heading: str) -> str:
    text = (REPOSITORY / "docs" / page).read_text(encoding="utf-8").partition(f"{heading}\n")[2]
    return re.split(r"^##+ ", text, maxsplit=1, flags=re.MULTILINE)[0]


def beside(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"`([\w/]+\.py)`", text.partition("Also entered")[2].partition("\n\n`tests/")[0]))


def of_a_gradient() -> Road:
    """The files and functions in the second column of the table."""
    text, steps = section("instep.md", "## One gradient, there and back"), list[Step]()
    for cell in re.findall(r"^\|[ \d]+\|([^|]+)\|", text, flags=re.MULTILINE):
        file = ""
        for name in re.findall(r"`([^`]+)`", cell):
            if name.endswith(".py"):
                file = name
            else:
                steps.append(Step(file, name))
    return Road(tuple(steps), beside(text))


def of_a_death() -> Road:
    """The lines of the drawing."""
    text = section("architecture.md", "### A step with a death: `instep/step.py`")
    line = r"^( *)([\w/]+\.py)  ([\w.]+)(?:  .*?)?(?:-> (\w+)/)?$"
    lines = re.findall(line, text.split("```")[1], flags=re.MULTILINE)
    steps = (Step(file, function, len(indent) // 2, into) for indent, file, function, into in lines)
    return Road(tuple(steps), beside(text))


@pytest.fixture(scope="module")
def calls(forkserver: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> list[Call]:
    out = tmp_path_factory.mktemp("roads")
    case = Case(DP3, (Strike(2, 0, DEATH, "backward"),), DEATH).altered("calls.record", 0, out / "calls.json")
    result = case.run(forkserver, out)
    assert result.ended.codes == [0, 0, -9], result.told()
    return read(out / "calls.json")


def iteration(calls: Sequence[Call], number: int) -> range:
    begins = [n for n, call in enumerate(calls) if call.function == "TrainingHooks._step"]
    return [range(begin, end) for begin, end in pairwise([*begins, len(calls)])][number - 1]


def first(calls: Sequence[Call], among: Iterable[int], function: str) -> int:
    return next(n for n in among if calls[n].function == function)


def of(packages: Sequence[str], files: Iterable[str]) -> set[str]:
    return {file for file in files if file.split("/")[0] in packages}


def other_files(must: set[str], may: set[str], entered: set[str]) -> list[str]:
    """The files that ``must`` be entered and are not, and those that are and not ``may``."""
    wrong = [f"{file} is listed and not entered" for file in sorted(must - entered)]
    return wrong + [f"{file} is entered and not listed" for file in sorted(entered - may)]


def wrong_of_a_gradient(unreachable: Road, calls: Sequence[Call]) -> list[str]:
    """What is wrong with the list: the training thread and the ring's call its functions, each thread those of its own,
    for the first time in the order of the list."""
    within = iteration(calls, DEATH - 1)
    training = calls[within[0]].thread
    computes = first(calls, within, "MegatronTrainer.compute")
    seen = [n for n in within if n >= computes and (calls[n].thread == training or calls[n].thread.startswith("ring-"))]
    wrong, last = list[str](), dict[str, int]()
    for step in unreachable.steps:
        at = next((n for n in seen if (calls[n].file, calls[n].function) == (step.file, step.function)), -1)
        if at < last.get(calls[at].thread, 0):
            wrong.append(f"{step.file} {step.function} is not called, or before what is above it")
        else:
            last[calls[at].thread] = at
    begin, end = (first(calls, seen, function) for function in (LAST_GRADIENT, COMMITTED))
    entered = of(OF_A_GRADIENT, (calls[n].file for n in seen if begin <= n < end))
    names = [step.function for step in unreachable.steps]
    between = unreachable.steps[names.index(LAST_GRADIENT) : names.index(COMMITTED)]
    must = of(OF_A_GRADIENT, (step.file for step in between))
    return wrong + other_files(must | unreachable.beside, unreachable.files | unreachable.beside, entered)


def wrong_of_a_death(unreachable: Road, calls: Sequence[Call]) -> list[str]:
    """What is wrong with the list: the training thread calls its functions, each in the call that it is indented below,
    and there for the first time in the order of the list."""
    within = iteration(calls, DEATH)
    training = calls[within[0]].thread
    begin = first(calls, within, "Step._meet")
    end = first(calls, range(begin, within.stop), "Step._reduce")
    above: dict[int, list[int]] = {-1: []}
    """Call that is followed -> those in which it is made."""
    for n in range(begin, end + 1):
        call, parent = calls[n], calls[n].parent if calls[n].parent >= begin else -1
        if call.thread == training and parent in above and calls[parent].function != "MegatronTrainer.compute":
            above |= {n: [*above[parent], parent]} if of(OF_A_DEATH, [call.file]) else {}
    del above[-1]
    wrong, last, under = list[str](), -1, [-1]
    for step in unreachable.steps:
        del under[step.depth + 1 :]
        names = step.file, step.function
        here = (n for n in above if (calls[n].file, calls[n].function) == names and under[-1] in above[n])
        if (found := next(here, -1)) <= last:
            wrong.append(f"{step.file} {step.function} is not called there, or before what is above it")
            continue
        last = found
        under.append(found)
        if step.into and not any(call.parent == found and of([step.into], [call.file]) for call in calls):
            wrong.append(f"{step.file} {step.function} does not call {step.into}/")
    files = unreachable.files | unreachable.beside
    return wrong + other_files(files, files, {calls[n].file for n in above})


WAYS = {
    "of a gradient": (of_a_gradient, wrong_of_a_gradient),
    "after a death": (of_a_death, wrong_of_a_death),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_calls_that_the_docs_list_are_those_that_are_made(calls: list[Call], way: str) -> None:
    listed, wrong = WAYS[way]
    assert 15 <= len(listed().files) <= 20
    assert wrong(listed(), calls) == []


@pytest.mark.parametrize("way", WAYS)
def test_every_error_in_a_list_is_told(calls: list[Call], way: str) -> None:
    listed, wrong = WAYS[way]
    unreachable = listed()
    for file in unreachable.beside:
        assert wrong(replace(unreachable, beside=unreachable.beside - {file}), calls) == [
            f"{file} is entered and not listed"
        ]
    more = unreachable.beside | {"instep/meeting/spare.py"}
    assert wrong(replace(unreachable, beside=more), calls) == ["instep/meeting/spare.py is listed and not entered"]
    for n, step in enumerate(unreachable.steps):
        renamed = replace(step, function=f"{step.function}_as_it_was")
        if step.function not in (LAST_GRADIENT, COMMITTED):
            assert wrong(
                replace(unreachable, steps=(*unreachable.steps[:n], renamed, *unreachable.steps[n + 1 :])), calls
            ), step
        for other in () if step.function in LAST_OF_A_THREAD else unreachable.steps[n + 1 : n + 2]:
            swapped = (*unreachable.steps[:n], other, step, *unreachable.steps[n + 2 :])
            assert wrong(replace(unreachable, steps=swapped), calls), (step, other)
