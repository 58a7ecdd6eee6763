"""What users' loops do beside training, on several workers of which some die, against one worker alone: bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.examples.launching import ELASTIC, finish, start
from tests.examples.test_plain_pytorch import same
from tests.harness.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("plain pytorch")]

SCRIPT, STEPS, HELD = "tests/elastic/situations.py", 12, 9


def lines(out: Path, worker: int) -> dict[Any, Any]:
    """Step, or "end" -> what the worker had and drew after it, and the loss without what rounding leaves of it."""
    text = (out / f"worker-{worker}.log").read_text()
    told = map(json.loads, filter(lambda line: line[:1] == "[", text.splitlines()))
    return {step: [bits, drawn, f"{loss:.10e}"] for step, loss, bits, drawn in told}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """Those of one worker without a death."""
    out = tmp_path_factory.mktemp("alone")
    (out / "go").touch()
    finish(start(out, SCRIPT, out, STEPS, HELD, "", workers=1))
    its = lines(out, 0)
    assert sorted(step for step in its if step != "end") == list(range(1, STEPS + 1))
    parameters = [its[step][0] for step in range(1, STEPS + 1)]
    early, late, even = ([at[number] for at in parameters] for number in range(3))
    assert len(set(early[3:])) == 1, "the layer stays as it is from the step on after which it is frozen"
    assert len(set(early[:4])) == 4
    assert len(set(late[:6])) == 1
    assert len(set(late[6:])) == 6, "it is trained from the step on after which it is unfrozen"
    assert even[0::2][1:] == even[1::2][:-1], "an odd step leaves alone what it does not use"
    assert len(set(even)) == 1 + STEPS // 2
    return its


def test_workers_that_die_while_they_save_and_one_that_comes_leave_every_number_as_it_is(
    tmp_path: Path, alone: dict[Any, Any]
) -> None:
    """Worker 0 dies in the checkpoint of step 6, worker 3 comes, worker 1 dies in the last checkpoint."""
    options = [*ELASTIC, "--max-restarts", "1"]
    training = start(tmp_path, SCRIPT, tmp_path, STEPS, HELD, "0@6,1@12", workers=3, options=options)
    there = '"event":"attached","worker":3,'
    eventually(lambda: any(there in log.read_text() for log in tmp_path.glob("events-*.jsonl")), "another one is there")
    (tmp_path / "go").touch()
    said = finish(training)
    assert said.count("was killed by SIGKILL") == 2, said
    came = lines(tmp_path, 3)
    assert max(step for step in came if step != "end") == STEPS
    assert lines(tmp_path, 2) == alone
    for worker in (0, 1, 3):
        its = lines(tmp_path, worker)
        assert its == {step: alone[step] for step in its}
    saved = torch.load(tmp_path / "checkpoint.pt")
    assert saved["completed"] == STEPS, "the worker that led then has saved the last step"
    last = {name: value.numpy().tobytes().hex() for name, value in saved["state"]["model"].items()}
    assert list(last.values()) == alone["end"][0][:4]
    again = finish(start(tmp_path, SCRIPT, tmp_path, STEPS, HELD, "", workers=3))
    assert again.count("all 12 steps were completed before; nothing is left to train") == 3, again
    for worker in range(3):
        ((step, its),) = lines(tmp_path, worker).items()
        assert (step, its) == ("end", alone["end"]), "all workers have the state of the checkpoint"


def test_a_worker_whose_state_is_not_that_of_most_takes_over_theirs(tmp_path: Path) -> None:
    """From step 5 on it trains with the others' state again; step 4 was the sum of two models' gradients."""
    finish(start(tmp_path, "tests/elastic/drifting.py", tmp_path, workers=3))
    text = (tmp_path / "worker-1.log").read_text()
    assert "the state of worker 1 after step 4 is not that of workers 0, 2 (model.2.bias)" in text
    assert "worker 1 has the state after step 4, from worker 0" in text
    states = [torch.load(tmp_path / f"worker-{worker}.pt") for worker in range(3)]
    assert all(state["completed"] == 7 for state in states)
    assert same(states[1], states[0])
    assert same(states[2], states[0])


def test_a_run_of_two_whose_states_differ_ends_with_12_and_names_what_differs(tmp_path: Path) -> None:
    said = finish(start(tmp_path, "tests/elastic/drifting.py", tmp_path, workers=2), code=12)
    assert "the states of workers 0, 1 differ after step 4 (model.2.bias)" in said
    assert "start again from the last checkpoint" in said
