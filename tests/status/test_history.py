"""What the files of a log folder tell of the training, and the one word for what a run does."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recover_megatron.run_log.events import EVENTS_FILE, EventsFile
from recover_megatron.run_log.steps import STEPS_FILE, StepRecord, StepsFile
from recover_megatron.status.folder import History, Training, worker_processes
from recover_megatron.status.headline import Level, headline
from recover_megatron.status.model import Gone, RunStatus, Stall, read
from tests.status.test_status_model import GRID, VIEW, placed

BEGUN = 1000.0


def steps(folder: Path, first: int, last: int, *, replicas: int = 4, seconds: float = 0.5) -> None:
    file = StepsFile(folder / STEPS_FILE, first)
    for n in range(first, last + 1):
        file.append(StepRecord(n, 3.0 - n / 100, 1.0, 8 * n, 1, replicas, seconds, {0: list(range(8))}))
    file.close()


def event(where: Path, name: str, time: float, **fields: Any) -> None:
    with (where / EVENTS_FILE).open("a") as file:
        file.write(json.dumps({"event": name, "time": time, **fields}) + "\n")


def start(folder: Path, at: float = BEGUN, **fields: Any) -> None:
    told = {"world": 4, "replicas": [0, 1, 2, 3], "train_iters": 100, "flops_per_sample": 1e12, "iteration": 1}
    event(folder, "start", at, **{**told, **fields})


def history_of(folder: Path) -> History:
    history = History(folder)
    history.read()
    return history


def training_at(history: History, now: float) -> Training:
    training = history.training(now)
    assert training is not None
    return training


def test_the_pace_the_way_to_go_and_the_goodput_come_from_the_files(tmp_path: Path) -> None:
    start(tmp_path)
    steps(tmp_path, 1, 40)
    event(tmp_path, "checkpoint", BEGUN + 15, saved=30, folder="here")
    training = training_at(history_of(tmp_path), BEGUN + 40)
    assert (training.iteration, training.train_iters, training.checkpoint) == (40, 100, 30)
    assert training.seconds_per_iteration == pytest.approx(0.5)
    assert training.samples_per_second == pytest.approx(16)
    assert training.tflops_per_gpu == pytest.approx(16 / 4)
    assert training.eta_seconds == pytest.approx(30)
    assert training.goodput == pytest.approx(0.5)
    assert training.checkpoint_age == pytest.approx(25)


def test_time_with_fewer_replicas_and_time_to_recover_are_no_goodput(tmp_path: Path) -> None:
    start(tmp_path)
    steps(tmp_path, 1, 10)
    steps(tmp_path, 11, 20, replicas=2)
    event(tmp_path, "plan", BEGUN + 5, lost_replicas=[2, 3], lost_workers=[2, 3])
    event(tmp_path, "recovery", BEGUN + 6, reran={"0": [1, 2], "1": [3]}, seconds={"rendezvous": 0.5})
    event(tmp_path, "plan", BEGUN + 7, lost_replicas=[], lost_workers=[])
    history = history_of(tmp_path)
    training = training_at(history, BEGUN + 10)
    assert training.goodput == pytest.approx((5 + 2.5 - 0.5) / 10)
    assert (training.recoveries, training.microbatches_rerun) == (1, 3)
    assert history.phases == [("rendezvous", 0.5)]


def test_what_is_written_meanwhile_is_read_on_and_half_a_line_is_left_for_later(tmp_path: Path) -> None:
    start(tmp_path)
    steps(tmp_path, 1, 3)
    history = history_of(tmp_path)
    steps(tmp_path, 4, 4)
    whole = (tmp_path / STEPS_FILE).read_bytes()
    (tmp_path / STEPS_FILE).open("ab").write(whole.splitlines()[-1][:20])
    EventsFile(tmp_path / EVENTS_FILE).append("checkpoint", saved=4)
    history.read()
    assert [step.iteration for step in history.recent] == [1, 2, 3, 4]
    assert [told["event"] for told in history.news] == ["checkpoint"]


def test_a_run_that_begins_again_in_the_folder_is_told_of_alone(tmp_path: Path) -> None:
    start(tmp_path)
    steps(tmp_path, 1, 40)
    event(tmp_path, "plan", BEGUN + 5, lost_replicas=[2], lost_workers=[2])
    history = history_of(tmp_path)
    start(tmp_path, BEGUN + 100, iteration=21)
    steps(tmp_path, 21, 22)
    history.read()
    training = training_at(history, BEGUN + 110)
    assert (training.iteration, training.recoveries) == (22, 0)
    assert training.goodput == pytest.approx(0.1)


def test_an_empty_folder_and_spoiled_files_tell_nothing(tmp_path: Path) -> None:
    history = history_of(tmp_path)
    assert history.training(0.0) is None
    assert worker_processes(tmp_path) == {}
    for name in (STEPS_FILE, EVENTS_FILE, "workers.json"):
        (tmp_path / name).write_text('{"event": 3}\n[1]\nno json\n{"iteration": 4}\n')
    history.read()
    assert history.training(0.0) is None
    assert worker_processes(tmp_path) == {}


@pytest.mark.parametrize(
    ("fate", "why", "exit_", "cause"),
    [
        ("dead", "its connection was closed", "", "ended"),
        ("dead", "its connection was closed", "SIGKILL", "killed"),
        ("dead", "its process has ended (SIGSEGV)", "", "killed"),
        ("dead", "RuntimeError: no", "exit code 1", "exit"),
        ("out", "no progress for 6.4 s at iteration 7, forward while others wait", "SIGKILL", "hang"),
        ("out", "silent for 5.2 s", "", "silent"),
        ("out", "its connection failed: no route to host", "", "unreachable"),
    ],
)
def test_causes_are_few(fate: str, why: str, exit_: str, cause: str) -> None:
    assert Gone(1, fate, "h", why, 1.0, exit_).cause == cause


def status(**fields: Any) -> RunStatus:
    return read({**VIEW, **fields}, "a:1")


WAITING = [
    placed(n, n // 2, n % 2, iteration=7, phase="agree", marked=43.0, **({"waiting": 42.0} if n != 5 else {}))
    for n in range(6)
]
CULPRIT = [*WAITING[:5], placed(5, 2, 1, iteration=7, phase="forward", marked=42.0)]
WRITER = [*WAITING[:5], placed(5, 2, 1, iteration=7, phase="checkpoint", marked=42.0)]


@pytest.mark.parametrize(
    ("told", "text", "level"),
    [
        (status(), "HEALTHY 3/3 replicas", Level.OK),
        (status(workers=GRID[:4]), "DEGRADED 2/3 replicas", Level.WARNING),
        (status(state="rendezvous", opened=2), "RECOVERING: opens epoch 2", Level.WARNING),
        (status(state="rendezvous", epoch=0), "STARTING: the workers build their models", Level.WARNING),
        (status(state="standby", epoch=0), "STARTING: no coordinator leads: 6 of 6 workers have come", Level.WARNING),
        (status(workers=CULPRIT), "STALLED 42 s in forward at worker 5 on h", Level.CRITICAL),
        (status(workers=WRITER), "HEALTHY 3/3 replicas", Level.OK),
        (
            replace(status(), stall=Stall(30.0, 570.0, [3], ["worker 3 on h: no progress"])),
            "STALLED for 30 s: waits, worker 3 on h: no progress",
            Level.CRITICAL,
        ),
        (
            read({"type": "stop", "code": 130, "reason": "ended by SIGINT", "epoch": 1}, "a:1"),
            "ENDED: exit code 130: ended by SIGINT",
            Level.CRITICAL,
        ),
        (
            read({"type": "stop", "code": 0, "reason": "all workers have left", "epoch": 1}, "a:1"),
            "ENDED: finished, exit code 0: all workers have left",
            Level.OK,
        ),
    ],
)
def test_what_a_run_does_is_one_word_with_a_level_for_monitoring(told: RunStatus, text: str, level: Level) -> None:
    assert (headline(told).text, headline(told).level) == (text, level)
    assert headline(told).text.startswith(headline(told).word)


def test_the_iteration_is_not_behind_what_is_committed() -> None:
    newer = Training(99, None, None, None, None, None, None, None, None, None, None, 0, 0)
    assert status().iteration < 99
    assert status().with_files(newer, {}).iteration == 99
    assert status().with_files(replace(newer, iteration=1), {}).iteration == status().iteration


def test_a_worker_has_its_process_and_how_it_ended(tmp_path: Path) -> None:
    entries = [
        {"worker_id": 0, "pid": 77, "local_rank": 3, "signal": None, "exit_code": None, "replaces": None},
        {"worker_id": 5, "pid": 78, "local_rank": 1, "signal": 9, "exit_code": None, "replaces": 1},
    ]
    (tmp_path / "workers.json").write_text(json.dumps(entries))
    dead = {"worker": 5, "fate": "dead", "host": "h", "why": "gone", "ago": 2.0, "phase": "forward", "iteration": 7}
    told = status(workers=[*GRID[:5], dead]).with_files(None, worker_processes(tmp_path))
    first = told.grid[0].workers[0]
    assert (first.pid, first.device, told.restarts) == (77, 3, 1)
    gone = told.gone[0]
    assert (gone.exit, gone.phase, gone.iteration) == ("SIGKILL", "forward", 7)


@pytest.mark.parametrize(("first", "shown"), [(1, None), (5, None), (6, 5)], ids=["afresh", "from 4", "from the last"])
def test_the_iterations_of_an_earlier_launch_are_not_this_ones(tmp_path: Path, first: int, shown: int | None) -> None:
    """The file begins anew with the first iteration of the new launch; a launch that goes on behind it has it still."""
    start(tmp_path)
    steps(tmp_path, 1, 5)
    history = History(tmp_path)
    start(tmp_path, time.time() + 60, iteration=first)
    history.read()
    training = history.training(time.time() + 120)
    assert (training.iteration if training is not None else None) == shown
