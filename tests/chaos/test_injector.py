"""The fault specification: what it means, its errors all at once; the injector strikes exactly where it says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recover_megatron.chaos import PHASES, BadSpec, Fault, InjectedFault, Injector, Kind, parse_spec
from tests.harness import REPOSITORY
from tests.harness.waiting import DEADLINE

WORKER = """
import sys
from recover_megatron.chaos import Injector, parse_spec
injector = Injector(parse_spec(sys.argv[1]), 1)
for iteration in (1, 2, 3):
    for phase in ("forward", "backward", "forward", "backward", "agree"):
        injector.at(phase, iteration)
        print(iteration, phase, flush=True)
"""
VISITS = [(i, phase) for i in (1, 2, 3) for phase in ("forward", "backward", "forward", "backward", "agree")]


def start(spec: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, spec], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


@pytest.mark.parametrize(
    ("spec", "survived", "code"),
    [
        ("1@2:forward", 5, -signal.SIGKILL),
        ("1@2:backward#2:kill,0@1:forward:kill", 8, -signal.SIGKILL),
        ("1@3:agree:exit", 14, 1),
        ("1@1:backward:raise", 1, 1),
        ("0@1:forward,1@4:agree,1@2:agree#2", 15, 0),
    ],
)
def test_the_worker_ends_at_the_visit_that_was_named_and_at_no_other(spec: str, survived: int, code: int) -> None:
    process = start(spec)
    out, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == code
    assert out.splitlines() == [f"{iteration} {phase}" for iteration, phase in VISITS[:survived]]
    assert ("InjectedFault" in err) == ("raise" in spec)
    assert ("recover: injected fault 1@" in err) == (code != 0)


def test_a_stopped_worker_hangs_and_goes_on_when_it_is_continued() -> None:
    process = start("1@2:agree:stop")
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    assert os.WSTOPSIG(status) == signal.SIGSTOP
    process.send_signal(signal.SIGCONT)
    out, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0
    assert len(out.splitlines()) == 15


@given(st.integers(1, 5), st.integers(1, 5))
def test_only_the_visit_of_its_iteration_counts(visit: int, iteration: int) -> None:
    injector = Injector(parse_spec(f"0@{iteration}:forward#{visit}:raise"), 0)
    for other in range(1, iteration):
        for _ in range(6):
            injector.at("forward", other)
    for _ in range(visit - 1):
        injector.at("forward", iteration)
        injector.at("backward", iteration)
    assert injector.active
    with pytest.raises(InjectedFault, match=f"0@{iteration}:forward"):
        injector.at("forward", iteration)
    assert not injector.active
    injector.at("forward", iteration)


def test_an_injector_without_faults_of_its_worker_is_not_active() -> None:
    assert not Injector(parse_spec("1@2:forward"), 0).active
    assert Injector(parse_spec("1@2:forward"), 1).active


def test_a_device_is_broken_as_the_worker_knows_how_and_without_one_the_fault_is_an_exception() -> None:
    broken: list[str] = []
    Injector(parse_spec("1@3:forward:device"), 1, lambda: broken.append("device")).at("forward", 3)
    assert broken == ["device"]
    with pytest.raises(InjectedFault, match="1@3:forward:device"):
        Injector(parse_spec("1@3:forward:device"), 1).at("forward", 3)


FAULTS = st.builds(
    Fault,
    worker=st.integers(0, 999),
    iteration=st.integers(1, 10**6),
    phase=st.sampled_from(PHASES),
    kind=st.sampled_from(Kind),
    visit=st.integers(1, 40),
)


@given(st.lists(FAULTS, unique_by=lambda f: (f.worker, f.iteration, f.phase, f.visit)))
def test_what_is_written_is_what_is_read(faults: list[Fault]) -> None:
    assert parse_spec(",".join(map(str, faults))) == faults


def test_kill_at_the_first_visit_is_the_default() -> None:
    assert parse_spec("5@7:backward") == [Fault(5, 7, "backward", Kind.KILL, 1)]
    assert parse_spec(" 5@7:forward#2:stop , 3@4:reduce-scatter#5") == [
        Fault(5, 7, "forward", Kind.STOP, 2),
        Fault(3, 4, "reduce-scatter", Kind.KILL, 5),
    ]
    assert parse_spec("  ") == []


def test_all_errors_are_told_at_once() -> None:
    with pytest.raises(ValueError, match="iterations count from 1") as caught:
        parse_spec("5,1@0:forward,1@2:lunch:tickle,9@1:agree,1@3:agree#0,2@2:eval:exit,2@2:eval,", workers=4)
    assert isinstance(caught.value, BadSpec)
    said = "\n".join(caught.value.reasons)
    assert len(caught.value.reasons) == 8
    assert "fault '5': not of the form WORKER@ITERATION:PHASE[#VISIT][:KIND]" in said
    assert "fault '1@2:lunch:tickle': unknown phase 'lunch'; the phases are data, forward, backward" in said
    assert "fault '1@2:lunch:tickle': unknown kind 'tickle'; the kinds are kill, stop, raise, exit" in said
    assert "fault '9@1:agree': there is no worker 9; the workers are 0 to 3" in said
    assert "fault '1@3:agree#0': visits count from 1" in said
    assert "fault '2@2:eval': '2@2:eval:exit' already strikes the same worker at the same place" in said
    assert "fault '': not of the form" in said


@pytest.mark.parametrize("text", ["-1@2:eval", "1@2", "1@2:eval:kill:stop", "1@2:eval#x", "1.0@2:eval", "²@1:eval"])
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(BadSpec, match="not of the form"):
        parse_spec(text)
