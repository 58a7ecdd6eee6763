"""What users' loops do beside training, on several workers of which some die, against one worker alone: bit for bit."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from recover_megatron.elastic.generators import Generators
from tests.elastic.situations import STEPS, Loop, M
from tests.examples.launching import ELASTIC, finish, start
from tests.examples.test_plain_pytorch import same
from tests.harness.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("plain pytorch")]

SCRIPT = "tests/elastic/situations.py"
Lines = dict[Any, list[Any]]
"""Step, or "end" -> what a worker had and drew after it, and the loss without what rounding leaves of it."""


def lines(out: Path, worker: int) -> Lines:
    text = (out / f"worker-{worker}.log").read_text()
    told = map(json.loads, filter(lambda line: line[:1] == "[", text.splitlines()))
    return {step: rest for step, *rest in told}


@pytest.fixture
def alone() -> Lines:
    """Those of a plain loop of one process, with the generators that the library has."""
    loop, generators, found = Loop(), Generators(0, torch.device("cpu")), {}
    for step in range(1, STEPS + 1):
        loop.optimizer.zero_grad()
        loss = 0.0
        for j in range(M):
            generators.for_microbatch(step, j)
            part = loop.microbatch(step, j) / M
            part.backward()
            loss += part.item()
        generators.for_update(step)
        loop.noise()
        loop.optimizer.step()
        step, *found[step] = loop.between(step, loss, partial(generators.after_lead, step, 1))
    found["end"] = [loop.bits(), [], ""]
    parameters = [found[step][0] for step in range(1, STEPS + 1)]
    early, late, even = ([at[number] for at in parameters] for number in range(3))
    assert [len(set(early[:4])), len(set(early[3:]))] == [4, 1], "a layer stays as it is when it is frozen"
    assert [len(set(late[:6])), len(set(late[6:]))] == [1, 6], "it is trained when it is unfrozen"
    assert even[0::2][1:] == even[1::2][:-1], "an odd step leaves alone what it does not use"
    assert len(set(even)) == 1 + STEPS // 2
    return found


def test_workers_that_die_while_they_save_and_one_that_comes_leave_every_number_as_it_is(
    tmp_path: Path, alone: Lines
) -> None:
    """Worker 0 dies in the checkpoint of step 6, worker 3 comes, worker 1 dies in the last checkpoint."""
    options = [*ELASTIC, "--max-restarts", "1"]
    training = start(tmp_path, SCRIPT, tmp_path, "0@6,1@12", workers=3, options=options)
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
    again = finish(start(tmp_path, SCRIPT, tmp_path, "", workers=2))
    assert again.count("all 12 steps are completed already; nothing is left to train") == 2, again
    for worker in range(2):
        ((step, its),) = lines(tmp_path, worker).items()
        assert (step, its) == ("end", alone["end"]), "all workers have the state of the checkpoint"


def test_a_worker_whose_state_is_not_that_of_most_takes_over_theirs(tmp_path: Path) -> None:
    """From step 5 on it trains with the others' state again; step 4 was the sum of two models' gradients."""
    finish(start(tmp_path, "tests/elastic/drifting.py", tmp_path, workers=3))
    text = (tmp_path / "worker-1.log").read_text()
    assert "the state of worker 1 after step 4 differs from that of workers 0, 2 (model.2.bias)" in text
    assert "worker 1 received the state after step 4 from worker 0" in text
    states = [torch.load(tmp_path / f"worker-{worker}.pt") for worker in range(3)]
    assert all(state["completed"] == 7 for state in states)
    assert same(states[1], states[0])
    assert same(states[2], states[0])


def test_a_run_of_two_whose_states_differ_ends_with_12_and_names_what_differs(tmp_path: Path) -> None:
    said = finish(start(tmp_path, "tests/elastic/drifting.py", tmp_path, workers=2), code=12)
    assert "the states of workers 0, 1 differ after step 4 (model.2.bias)" in said
    assert "restart from a checkpoint that is not newer than the previous comparison" in said
