"""What a log folder tells: which candidates, which ending, how the training gets on; and the one word for a run."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from recover_megatron.launch.workers import log_folder
from recover_megatron.launch.workers.log_folder import Claim
from recover_megatron.membership.io.journal import Journal
from recover_megatron.membership.messages.to_member import Stop
from recover_megatron.membership.records import FIRST_JOINED, AuthenticationError
from recover_megatron.report.history import history
from recover_megatron.run_log.events import EVENTS_FILE, EventsFile, read_run_events
from recover_megatron.run_log.steps import STEPS_FILE, StepRecord, StepsFile
from recover_megatron.status.__main__ import main
from recover_megatron.status.folder import (
    CLAIM_FILE,
    History,
    Training,
    candidates,
    ending,
    last_written,
    may_go_on,
    worker_processes,
)
from recover_megatron.status.headline import Level, headline
from recover_megatron.status.model import Gone, RunStatus, Stall, read
from recover_megatron.status.source import FolderSource, Watch
from tests.harness.waiting import DEADLINE
from tests.status.test_status_model import GRID, placed, seen

LAUNCHED, JOINED = "10.0.0.1:1000", "10.0.0.9:9000"
STOP = {"event": "stop", "code": 0, "reason": "all workers have left"}


def log(folder: Path, number: int, *records: dict[str, object]) -> None:
    with (folder / f"events-{number}.jsonl").open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def listening(address: str, time: float) -> dict[str, object]:
    return {"event": "listening", "address": address, "time": time}


def ending_of(folder: Path) -> RunStatus:
    status = ending(folder)
    assert status is not None
    return status


def test_candidates_that_joined_are_among_those_to_ask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log(tmp_path, 0, listening(LAUNCHED, 100.0))
    log(tmp_path, FIRST_JOINED + 7, listening(JOINED, 200.0))
    assert candidates(tmp_path) == f"{LAUNCHED},{JOINED}"
    assert main([str(tmp_path), "--coordinators"]) == 0
    assert capsys.readouterr().out == f"{LAUNCHED},{JOINED}\n"


def test_the_end_of_a_run_is_told_by_whichever_candidate_led_it(tmp_path: Path) -> None:
    log(tmp_path, 0, listening(LAUNCHED, 100.0))
    log(tmp_path, FIRST_JOINED, listening(JOINED, 200.0), {**STOP, "time": 300.0})
    assert ending_of(tmp_path).code == 0


def test_what_joined_an_earlier_run_in_the_folder_says_nothing_of_this_one(tmp_path: Path) -> None:
    log(tmp_path, FIRST_JOINED, listening(JOINED, 20.0), {**STOP, "time": 30.0})
    log(tmp_path, 0, listening(LAUNCHED, 10.0), listening(LAUNCHED, 100.0))
    assert ending(tmp_path) is None
    assert candidates(tmp_path) == LAUNCHED


def test_where_candidates_of_the_launch_were_started_again_those_that_joined_count(tmp_path: Path) -> None:
    log(tmp_path, 0, listening(LAUNCHED, 100.0), listening(LAUNCHED, 400.0))
    log(tmp_path, 1, listening("10.0.0.2:1", 100.0))
    log(tmp_path, FIRST_JOINED, listening(JOINED, 200.0), {"event": "lead", "term": 7, "time": 300.0})
    assert candidates(tmp_path) == f"{LAUNCHED},10.0.0.2:1,{JOINED}"


def test_one_side_of_a_partition_that_stopped_is_not_the_end_while_another_candidate_may_lead(tmp_path: Path) -> None:
    log(tmp_path, 0, listening(LAUNCHED, 100.0), {**STOP, "code": 11, "time": 300.0})
    assert not may_go_on(tmp_path)
    log(tmp_path, 1, listening(JOINED, 100.0))
    assert may_go_on(tmp_path)
    log(tmp_path, 1, {**STOP, "time": 400.0})
    assert not may_go_on(tmp_path)
    assert ending_of(tmp_path).code == 0


def test_where_nobody_answers_the_side_that_stopped_tells_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECOVER_SECRET", "one that is long enough")
    log(tmp_path, 0, listening("127.0.0.1:1", 100.0), {**STOP, "code": 11, "reason": "cut off", "time": 300.0})
    log(tmp_path, 1, listening("127.0.0.1:2", 100.0))
    assert main([str(tmp_path), "--check"]) == 2
    assert "exit code 11" in capsys.readouterr().out


def test_a_folder_without_a_launch_has_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--coordinators"]) == 1
    assert "give the --log-dir of a launch" in capsys.readouterr().err


@pytest.mark.parametrize("how", ["emptied", "moved", "moved, and made anew"])
def test_after_a_log_rotation_the_folder_tells_of_its_run_as_before(tmp_path: Path, how: str) -> None:
    """Of coordinators that have little to say, too; the report takes nothing for another launch."""
    log(tmp_path, 0, listening("10.0.0.1:999", 100.0), {"event": "plan", "epoch": 9, "time": 101.0})  # a launch before
    path, events = tmp_path / "events-0.jsonl", EventsFile(tmp_path / EVENTS_FILE)
    journal = Journal(path)
    journal({"event": "listening", "address": LAUNCHED, "world": 4})
    for term in (1, 2):
        journal({"event": "lead", "term": term})
        journal({"event": "plan", "epoch": term})
    events.append("start", iteration=1, train_iters=100, replicas=[0, 1])
    assert journal._file.flush(DEADLINE)
    looks_on = history_of(tmp_path)
    for file in (path, tmp_path / EVENTS_FILE):
        if how == "emptied":
            os.truncate(file, 0)
        else:
            file.rename(file.with_suffix(".jsonl.1"))
            if how != "moved":
                file.touch()
    if how == "emptied":
        with pytest.raises(ValueError, match=r"no events-<n>\.jsonl"):
            candidates(tmp_path)
    journal({"event": "commit", "iteration": 7})
    events.append("checkpoint", saved=7)
    journal.close()
    events.close()
    assert candidates(tmp_path) == LAUNCHED
    looks_on.read()
    assert {one["event"] for one in looks_on.news} == {"listening", "commit", "checkpoint"}, "no plan is told again"
    told = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(one["event"], one.get("term") or one.get("epoch")) for one in told] == [
        ("listening", None), ("lead", 2), ("plan", 2), ("commit", None)
    ]  # fmt: skip
    workers, coordinators, chaos = read_run_events(tmp_path)
    assert history(workers, coordinators, chaos).launches == 1
    assert [one["event"] for one in workers] == ["start", "checkpoint"]


def test_a_rotation_of_the_folder_costs_who_looks_on_nothing_and_who_comes_later_claims_no_goodput(
    tmp_path: Path,
) -> None:
    start(tmp_path)
    steps(tmp_path, 1, 20)
    event(tmp_path, "plan", BEGUN + 5, lost_replicas=[2], lost_workers=[2])
    looks_on = history_of(tmp_path)
    for name in (STEPS_FILE, EVENTS_FILE):
        (tmp_path / name).rename(tmp_path / f"{name}.1")
    start(tmp_path)  # told again
    steps(tmp_path, 21, 30)
    looks_on.read()
    training = training_at(looks_on, BEGUN + 20)
    assert (training.iteration, training.recoveries, looks_on.news) == (30, 1, [])
    assert training.goodput == pytest.approx(15 / 20)
    later = training_at(history_of(tmp_path), BEGUN + 20)
    assert (later.iteration, later.train_iters, later.goodput) == (30, 100, None)


@pytest.mark.parametrize("ahead", [-3600.0, 3600.0])
def test_the_clock_of_who_looks_changes_nothing_of_what_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: float
) -> None:
    begun = time.time() - ahead
    start(tmp_path, begun)
    file = StepsFile(tmp_path / STEPS_FILE, 1)
    for n in range(1, 41):
        file.append(StepRecord(n, 3.0, 1.0, 8 * n, 1, 4, 0.5, {0: [0]}, time=begun + n / 2))
    file.close()
    event(tmp_path, "checkpoint", begun + 15, saved=30, folder="here")
    log(tmp_path, 0, listening(LAUNCHED, begun))
    monkeypatch.setenv("RECOVER_SECRET", "one that is long enough")
    monkeypatch.setattr(Watch, "look", lambda *_: seen(commit_age=5.0))
    training = FolderSource(tmp_path, None).look().training
    assert training is not None
    assert training.goodput == pytest.approx(20 / 25)
    assert training.checkpoint_age == pytest.approx(10)


def test_a_coordinator_that_ends_while_the_secret_is_proved_to_it_does_not_hide_the_end_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The closed connection looks like a refused secret; where the run goes on it is told as one."""
    log(tmp_path, 0, listening(LAUNCHED, BEGUN))
    monkeypatch.setenv("RECOVER_SECRET", "one that is long enough")
    source = FolderSource(tmp_path, None)
    refused = Mock(side_effect=AuthenticationError(f"{LAUNCHED} rejects the secret"))
    monkeypatch.setattr(Watch, "look", refused)
    with pytest.raises(AuthenticationError):
        source.look()
    log(tmp_path, 0, {**STOP, "time": BEGUN + 1})
    status = source.look()
    assert (status.code, status.reason, refused.call_count) == (0, STOP["reason"], 2)


def claimed(folder: Path, **fields: object) -> None:
    claim = Claim(1, "h", 100.0, "id", 1, "127.0.0.1", 1, 2)
    (folder / CLAIM_FILE).write_text(json.dumps({**asdict(claim), **fields}))


def test_of_a_run_that_ended_before_a_coordinator_led_the_launcher_tells_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log(tmp_path, 0, listening(LAUNCHED, 100.0))
    assert CLAIM_FILE == log_folder.LOCK_FILE
    claimed(tmp_path)
    assert ending(tmp_path) is None  # it has not ended
    claimed(tmp_path, ended=True)
    assert ending(tmp_path) is None  # it starts again
    claimed(tmp_path, ended=True, code=130, reason="SIGINT received")
    assert main([str(tmp_path), "--check"]) == 2
    assert capsys.readouterr().out == "ENDED: exit code 130: SIGINT received\n"
    claimed(tmp_path, ended=True, code=130, reason="SIGINT received", nnodes=2)
    assert ending(tmp_path) is None  # others may go on


def test_workers_that_a_signal_to_the_launcher_ended_are_not_lost_and_ages_count_from_now(tmp_path: Path) -> None:
    now = time.time()
    death = {"event": "fault", "kind": "dead", "host": "h", "reason": "its connection was closed"}
    attached = [{"event": "attached", "worker": worker, "time": now - 900} for worker in (0, 1, 2)]
    lost = {**death, "worker": 1, "time": now - 800}
    stopping = {"event": "stopping", "node": "h-0", "signal": 2, "time": now - 700}
    ended = {**death, "worker": 0, "time": now - 700}
    sooner = {**ended, "worker": 2, "time": now - 700.1}  # known by its connection, before the launcher's word came
    hung = {**death, "kind": "out", "worker": 3, "time": now - 700.1}
    stopped = {**hung, "worker": 4, "time": now - 690}  # it did not hear SIGTERM, and was killed
    told = [
        {"event": "exception", "worker": 1, "error": "ValueError: bad"},
        lost,
        hung,
        sooner,
        {**death, "worker": 3, "time": now - 700},  # its launcher has killed it
        stopping,
        ended,
        stopped,
    ]
    log(tmp_path, 0, listening(LAUNCHED, now - 900), *attached, *told, {**STOP, "code": 130})
    status = ending_of(tmp_path)
    fates = {0: "stopped", 1: "dead", 2: "stopped", 3: "out", 4: "stopped"}
    assert {gone.worker: gone.fate for gone in status.gone} == fates
    assert [gone.worker for gone in status.lost] == [1, 3]
    assert status.gone[1].why == "ValueError: bad; its connection was closed"
    assert status.gone[1].ago is not None
    assert status.gone[1].ago >= 800


@pytest.mark.parametrize("begun", [False, True])
def test_before_its_first_plan_a_launch_has_no_iteration_of_an_earlier_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], begun: bool
) -> None:
    steps = StepsFile(tmp_path / STEPS_FILE, 1)
    steps.append(StepRecord(7, 3.0, 1.0, 56, 1, 2, 0.5, {0: [0, 1]}))
    steps.close()
    os.utime(tmp_path / STEPS_FILE, (149.0, 149.0))
    log(tmp_path, 0, listening(LAUNCHED, 100.0), {"event": "plan", "epoch": 1}, {**STOP, "time": 150.0})
    log(tmp_path, 0, listening(LAUNCHED, 200.0), *[{"event": "plan", "epoch": 1}] * begun, {**STOP, "time": 210.0})
    assert main([str(tmp_path), "--check"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("; iteration 7") == begun
    assert ("iteration 7" in last_written(tmp_path)) == begun
    assert main([str(tmp_path), "--json"]) == 0
    assert (json.loads(capsys.readouterr().out)["training"] is not None) == begun


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
    steps(tmp_path, 1, 10, replicas=8)  # more than at the launch: no more than whole, or they would hide the loss
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


WAITING = [
    placed(n, n // 2, n % 2, iteration=7, phase="agree", marked=43.0, **({"waiting": 42.0} if n != 5 else {}))
    for n in range(6)
]
CULPRIT = [*WAITING[:5], placed(5, 2, 1, iteration=7, phase="forward", marked=42.0)]
UNREADY = [placed(n, 0, n, joined=False) for n in range(6)]
WRITER = [*WAITING[:5], placed(5, 2, 1, iteration=7, phase="checkpoint", marked=42.0)]


@pytest.mark.parametrize(
    ("told", "text", "level"),
    [
        (seen(), "HEALTHY 3/3 replicas", Level.OK),
        (seen(workers=GRID[:4]), "DEGRADED 2/3 replicas", Level.WARNING),
        (seen(state="rendezvous", opened=2), "RECOVERING: opens epoch 2", Level.WARNING),
        (seen(state="rendezvous", epoch=0), "STARTING: all workers are ready", Level.WARNING),
        (seen(state="rendezvous", epoch=0, workers=UNREADY), "STARTING: the workers build their models", Level.WARNING),
        (seen(state="standby", epoch=0), "STARTING: no coordinator leads: 6 of 6 workers are connected", Level.WARNING),
        (seen(workers=CULPRIT), "STALLED 42 s in forward at worker 5 on h", Level.CRITICAL),
        (seen(workers=WRITER), "HEALTHY 3/3 replicas", Level.OK),
        (
            replace(seen(), stall=Stall(30.0, 570.0, [3], ["worker 3 on h: no progress"])),
            "STALLED for 30 s: waits for one worker, worker 3 on h: no progress",
            Level.CRITICAL,
        ),
        (
            read(Stop("ended by SIGINT", 130, 1), "a:1"),
            "ENDED: exit code 130: ended by SIGINT",
            Level.CRITICAL,
        ),
        (
            read(Stop("all workers have left", 0, 1), "a:1"),
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
    assert seen().iteration < 99
    assert seen().with_files(newer, {}).iteration == 99
    assert seen().with_files(replace(newer, iteration=1), {}).iteration == seen().iteration


def test_a_worker_has_its_process_and_how_it_ended(tmp_path: Path) -> None:
    entries = [
        {"worker_id": 0, "pid": 77, "local_rank": 3, "signal": None, "exit_code": None, "replaces": None},
        {"worker_id": 5, "pid": 78, "local_rank": 1, "signal": 9, "exit_code": None, "replaces": 1},
        {
            "worker_id": 6,
            "pid": 79,
            "local_rank": 2,
            "signal": 9,
            "exit_code": None,
            "kernel": "out of memory",
            "host": "h2",
        },
    ]
    (tmp_path / "workers.json").write_text(json.dumps(entries))
    dead = {"worker": 5, "fate": "dead", "host": "h", "why": "gone", "ago": 2.0, "phase": "forward", "iteration": 7}
    starved = {**dead, "worker": 6, "host": ""}  # of a coordinator that knows it from the one before
    told = seen(workers=[*GRID[:5], dead, starved]).with_files(None, worker_processes(tmp_path))
    assert (told.gone[1].exit, told.gone[1].cause, told.gone[1].host) == ("SIGKILL, out of memory", "killed", "h2")
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
