"""A log folder instead of addresses: which candidates it tells of, and which ending."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from recover_megatron.launch import log_folder
from recover_megatron.launch.log_folder import Claim
from recover_megatron.membership.records import FIRST_JOINED
from recover_megatron.run_log.steps import STEPS_FILE, StepRecord, StepsFile
from recover_megatron.status.__main__ import main
from recover_megatron.status.folder import CLAIM_FILE, candidates, ending, last_written, may_go_on

LAUNCHED, JOINED = "10.0.0.1:1000", "10.0.0.9:9000"
STOP = {"event": "stop", "code": 0, "reason": "all workers have left"}


def log(folder: Path, number: int, *records: dict[str, object]) -> None:
    with (folder / f"events-{number}.jsonl").open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def listening(address: str, time: float) -> dict[str, object]:
    return {"event": "listening", "address": address, "time": time}


def test_candidates_that_joined_are_among_those_to_ask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log(tmp_path, 0, listening(LAUNCHED, 100.0))
    log(tmp_path, FIRST_JOINED + 7, listening(JOINED, 200.0))
    assert candidates(tmp_path) == f"{LAUNCHED},{JOINED}"
    assert main([str(tmp_path), "--coordinators"]) == 0
    assert capsys.readouterr().out == f"{LAUNCHED},{JOINED}\n"


def test_the_end_of_a_run_is_told_by_whichever_candidate_led_it(tmp_path: Path) -> None:
    log(tmp_path, 0, listening(LAUNCHED, 100.0))
    log(tmp_path, FIRST_JOINED, listening(JOINED, 200.0), {**STOP, "time": 300.0})
    status = ending(tmp_path)
    assert status is not None
    assert status.code == 0


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
    status = ending(tmp_path)
    assert status is not None
    assert status.code == 0


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
    assert "was it the --log-dir of a launch here?" in capsys.readouterr().err


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
    log(tmp_path, 0, listening(LAUNCHED, now - 900), *attached, lost, sooner, stopping, ended, {**STOP, "code": 130})
    status = ending(tmp_path)
    assert status is not None
    assert [(gone.worker, gone.fate) for gone in status.gone] == [(0, "stopped"), (1, "dead"), (2, "stopped")]
    assert [gone.worker for gone in status.lost] == [1]
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
