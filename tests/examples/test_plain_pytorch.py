"""The loops of examples/, whoever is killed and whoever comes: plain PyTorch trains as one process does.

Those of accelerate and torchtitan run on stand-ins with their seams: what these show is that the examples fit the
seams, and that the library is called right.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from examples import plain_pytorch as example
from tests.drawn import some
from tests.examples.launching import ELASTIC, finish, losses, start
from tests.harness.processes import kill_first_candidate
from tests.harness.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("plain pytorch")]

STEPS = 9


def alone(steps: int) -> tuple[list[float], dict[str, Any]]:
    """The losses of one process without any group, and its state afterwards."""
    here = importlib.reload(example)
    losses = []
    for step in range(1, steps + 1):
        here.optimizer.zero_grad()
        parts = [here.microbatch(step, j) / 16 for j in range(16)]
        for part in parts:
            part.backward()
        here.optimizer.step()
        losses.append(sum(part.item() for part in parts))
    return losses, {"model": here.model.state_dict(), "optimizer": here.optimizer.state_dict()}


def check(out: Path, finishers: Sequence[int], newcomers: Sequence[int] = ()) -> None:
    """Each of them has the losses, the parameters and the optimizer's state of one process alone."""
    states = {worker: torch.load(out / f"worker-{worker}.pt") for worker in [*finishers, *newcomers]}
    steps = {state["completed"] for state in states.values()}
    assert len(steps) == 1, "all end with the same step"
    wanted, state = alone(steps.pop())
    for worker in finishers:
        assert list(losses(out, worker).values()) == pytest.approx(wanted, rel=1e-9)
    for worker in newcomers:
        mine = losses(out, worker)
        assert mine == pytest.approx({step: wanted[step - 1] for step in mine}, rel=1e-9)
        assert sorted(mine) == list(range(min(mine), len(wanted) + 1))
    first = states[finishers[0]]["state"]
    for worker, its in states.items():
        assert its["workers"] == sorted(states)
        assert same(its["state"], first), f"worker {worker} has other bits than worker {finishers[0]}"
    for name, parameter in state["model"].items():
        torch.testing.assert_close(first["model"][name], parameter, rtol=1e-8, atol=1e-11)
    for number, moments in state["optimizer"]["state"].items():
        for name, moment in moments.items():
            torch.testing.assert_close(first["optimizer"]["state"][number][name], moment, rtol=1e-8, atol=1e-11)


def same(a: Any, b: Any) -> bool:
    """Whether two trees are equal, tensors bit for bit; tuples count as lists."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


DEATHS = [
    pytest.param("1@2:microbatch,0@4:reduce,3@6:update", id="one after the other"),
    pytest.param("0@2:agree,2@4:microbatch,3@4:rerun", id="one in the recovery of the other"),
    pytest.param("0@3:reduce,3@3:reduced", id="two in one sum"),
]


@pytest.mark.parametrize("strikes", some("plain", DEATHS, 2))
def test_survivors_train_as_if_nobody_had_died(tmp_path: Path, strikes: str) -> None:
    said = finish(start(tmp_path, "tests/examples/struck_plain.py", strikes, tmp_path, STEPS))
    victims = {int(strike.split("@")[0]) for strike in strikes.split(",")}
    assert said.count("was killed by SIGKILL") == len(victims), said
    assert "worker 1 started with another state than worker 0" in said
    check(tmp_path, sorted(set(range(4)) - victims))
    for victim in victims:
        assert len(losses(tmp_path, victim)) < STEPS


def test_a_worker_that_comes_back_has_the_state_and_trains_on(tmp_path: Path) -> None:
    """The first that is started in place of the lost one dies while it is to get the state."""
    strikes, options = "2@3:reduced,4@1:state", [*ELASTIC, "--max-restarts", "2"]
    said = finish(start(tmp_path, "tests/examples/struck_plain.py", strikes, tmp_path, "5+4", options=options))
    assert said.count("was killed by SIGKILL") == 2, said
    assert "worker 5 received the state after step" in said
    check(tmp_path, [0, 1, 3], [5])


def test_a_killed_coordinator_is_succeeded(tmp_path: Path) -> None:
    go = tmp_path / "go"
    run = start(tmp_path, "tests/examples/held.py", 100, go, "examples/plain_pytorch.py", "--iterations", 120)
    log = tmp_path / "worker-2.log"
    eventually(lambda: log.exists() and 10 in losses(tmp_path, 2), "the run trains")
    kill_first_candidate(tmp_path)
    go.touch()
    finish(run)
    assert [losses(tmp_path, worker) for worker in (1, 2, 3)] == [losses(tmp_path, 0)] * 3
    assert sorted(losses(tmp_path, 0)) == list(range(1, 121))
    # Mostly the other candidate; the one that the launcher started in place of the killed one if the other was held up.
    events = [(tmp_path / name).read_text() for name in ("events-0.jsonl", "events-1.jsonl")]
    assert sum(text.count('"event":"lead"') for text in events) >= 2


DOUBLES = Path(__file__).parent / "doubles"
HELD_STEPS = 400


def held(out: Path, example: str, workers: int) -> subprocess.Popen[str]:
    flags = [HELD_STEPS - 20, out / "go", f"examples/{example}", HELD_STEPS]
    options = [*ELASTIC, "--max-restarts", "1"]
    return start(out, "tests/examples/held.py", *flags, workers=workers, options=options, path=[DOUBLES])


def pid_of(out: Path, worker: int) -> int | None:
    """None: workers.json does not tell yet."""
    path = out / "workers.json"
    workers = json.loads(path.read_text()) if path.exists() else []
    return next((each["pid"] for each in workers if each["worker_id"] == worker), None)


@pytest.mark.parametrize("example", ["accelerate_loop.py", "torchtitan_trainer.py"])
def test_a_killed_worker_changes_nothing(tmp_path: Path, example: str) -> None:
    for folder in ("alone", "struck"):
        (tmp_path / folder).mkdir()
    (tmp_path / "alone" / "go").touch()
    finish(held(tmp_path / "alone", example, 1))
    out = tmp_path / "struck"
    run = held(out, example, 3)
    log = out / "worker-1.log"
    eventually(lambda: log.exists() and 20 in losses(out, 1), "the run trains")
    eventually(lambda: pid_of(out, 1), "the launcher has written down who that is")
    os.kill(pid_of(out, 1), signal.SIGKILL)
    there = '"event":"attached","worker":3,'
    eventually(lambda: any(there in log.read_text() for log in out.glob("events-*.jsonl")), "another is in its place")
    (out / "go").touch()
    assert "was killed by SIGKILL" in finish(run)
    wanted = losses(tmp_path / "alone", 0)
    assert sorted(wanted) == list(range(1, HELD_STEPS + 1))
    assert len(losses(tmp_path / "struck", 1)) < HELD_STEPS
    for survivor in (0, 2):
        assert losses(tmp_path / "struck", survivor) == pytest.approx(wanted, rel=1e-7)
    came = losses(tmp_path / "struck", 3)
    assert came == pytest.approx({step: wanted[step] for step in came}, rel=1e-7)
    assert max(came) == HELD_STEPS, "a worker in its place has trained to the end"


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (
            ".square().mean()",
            ".abs().mean()",
            "runs another program than worker [02]: the content of script train.py differs",
        ),
        ("microbatches=16", "microbatches=32", r"worker [02] of the run: microbatches 32 \(the run: 16\)"),
    ],
    ids=["another loss", "more microbatches"],
)
def test_a_worker_in_place_of_a_lost_one_that_reads_an_edited_script_is_refused_and_the_others_finish(
    tmp_path: Path, old: str, new: str, why: str
) -> None:
    script, go = tmp_path / "train.py", tmp_path / "go"
    text = Path(str(example.__file__)).read_text()
    assert old in text
    script.write_text(text)
    options = [*ELASTIC, "--max-restarts", "1"]
    run = start(
        tmp_path, "tests/examples/held.py", 5, go, script, "--iterations", STEPS, workers=3, options=options
    )  # fmt: skip
    eventually(lambda: all(pid_of(tmp_path, worker) for worker in range(3)), "the launcher has written down who is who")
    logs = [tmp_path / f"worker-{worker}.log" for worker in range(3)]
    eventually(lambda: all(log.exists() and "iteration 5 " in log.read_text() for log in logs), "the run trains")
    script.write_text(text.replace(old, new))
    os.kill(pid_of(tmp_path, 1) or 0, signal.SIGKILL)
    there = '"event":"attached","worker":3,'
    eventually(lambda: any(there in log.read_text() for log in tmp_path.glob("events-*.jsonl")), "another one is there")
    go.touch()
    said = finish(run)
    (refusal,) = re.findall("worker 3 exits, and the run continues without it: it (.*)", said)
    assert re.search(why, refusal)
    wanted, _ = alone(STEPS)
    for survivor in (0, 2):
        assert list(losses(tmp_path, survivor).values()) == pytest.approx(wanted, rel=1e-9)
