"""events.jsonl: whole lines, whoever writes and whoever is killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from recover_megatron.run_log.events import EventsFile, read_events, read_run_events
from tests.harness.waiting import DEADLINE


def test_events_are_read_as_they_were_written(tmp_path: Path) -> None:
    before = time.time()
    file = EventsFile(tmp_path / "new" / "events.jsonl")
    file.append("plan", worker=3, iteration=7, quotas={0: 8, 1: 7})
    file.append("end", worker=3, iteration=9)
    plan, end = read_events(tmp_path / "new" / "events.jsonl")
    assert {**plan, "time": 0} == {
        "event": "plan", "time": 0, "worker": 3, "iteration": 7, "quotas": {"0": 8, "1": 7},
    }  # fmt: skip
    assert before - 1 <= plan["time"] <= end["time"] <= time.time() + 1


def write(path: Path, worker: int) -> None:
    file = EventsFile(path)
    for _ in range(100_000):  # until it is killed; an end, in case the test was
        file.append("plan", worker=worker, text=str(worker) * 3000)


def test_lines_of_many_writers_stay_whole_though_they_are_killed(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    context = multiprocessing.get_context("spawn")  # pytest may run other threads
    writers = [context.Process(target=write, args=(path, n)) for n in range(4)]
    for writer in writers:
        writer.start()
    deadline = time.monotonic() + DEADLINE
    while len({event["worker"] for event in read_events(path)}) < 4 and time.monotonic() < deadline:
        time.sleep(0.001)
    for writer in writers:
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
    assert path.read_bytes().endswith(b"\n")
    assert {event["worker"] for event in read_events(path)} == set(range(4))
    assert all(event["text"] == str(event["worker"]) * 3000 for event in read_events(path))


def test_a_cut_last_line_is_left_out_and_a_bad_one_before_it_is_named(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert list(read_events(path)) == []
    good = '{"event": "end", "time": 1.5}\n'
    path.write_text(good + '{"event": "en')
    assert list(read_events(path)) == [{"event": "end", "time": 1.5}]
    for bad in ('{"event": "end"}\n', "[]\n", '{"event": 1, "time": 1}\n', "junk\n"):
        path.write_text(good + bad + good)
        with pytest.raises(ValueError, match=r"events\.jsonl:2: no event"):
            list(read_events(path))


def test_a_line_at_which_its_writer_died_costs_nobody_the_others(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "a", "time": 1}\n{"event": "b", "ti')
    file = EventsFile(path)
    file.append("c")
    file.close()
    assert [event["event"] for event in read_events(path)] == ["a", "c"]


def test_the_files_of_a_run_are_told_apart_and_sorted_by_time(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"event": "a", "time": 2}\n{"event": "b", "time": 1}\n')
    (tmp_path / "events-0.jsonl").write_text('{"event": "c", "time": 5, "mono": 1}\n')
    (tmp_path / "events-1.jsonl").write_text('{"event": "d", "time": 4, "mono": 1}\n')
    (tmp_path / "chaos.jsonl").write_text('{"event": "strike", "time": 3}\n')
    names = [[event["event"] for event in group] for group in read_run_events(tmp_path)]
    assert names == [["b", "a"], ["d", "c"], ["strike"]]
    assert [event["file"] for event in read_run_events(tmp_path)[1]] == ["events-1.jsonl", "events-0.jsonl"]
