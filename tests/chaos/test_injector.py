"""The injector strikes exactly where the specification says, with real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recover_megatron.chaos import InjectedFault, Injector, parse_spec
from tests.harness.waiting import DEADLINE

REPOSITORY = Path(__file__).resolve().parents[2]

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
