"""steps.jsonl and events.jsonl: what they promise to readers after a crash or a resume, whoever is killed."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

import pytest

from recover_megatron.network.event_loop import is_ready
from recover_megatron.run_log import events, steps
from recover_megatron.run_log.events import EventsFile, Lines, read_events, read_run_events
from recover_megatron.run_log.steps import StepRecord, StepsFile, audit_problem, not_shown, read_steps, violations
from tests.harness import REPOSITORY
from tests.harness.waiting import DEADLINE


def step(iteration: int, **changes: object) -> StepRecord:
    whole = StepRecord(
        iteration=iteration,
        loss=1.0 / 3.0 + iteration,
        grad_norm=0.1,
        consumed_samples=8 * iteration,
        epoch=0,
        replicas=2,
        seconds=0.5,
        microbatches={0: [0, 2], 1: [1, 3]},
    )
    return dataclasses.replace(whole, **changes)  # type: ignore[arg-type]


def write(path: Path, iterations: range) -> None:
    file = StepsFile(path, first_iteration=iterations.start)
    for iteration in iterations:
        file.append(step(iteration))


def test_a_step_is_read_as_it_was_written_to_the_last_digit(tmp_path: Path) -> None:
    write(tmp_path / "steps.jsonl", range(1, 4))
    assert list(read_steps(tmp_path / "steps.jsonl")) == [step(1), step(2), step(3)]


def test_every_appended_line_outlives_a_kill_of_its_writer(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    code = (
        "import os, signal, sys, pathlib; from tests.run_log.test_steps import write\n"
        "write(pathlib.Path(sys.argv[1]), range(1, 6)); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], cwd=REPOSITORY, check=False, timeout=DEADLINE)
    assert done.returncode == -signal.SIGKILL
    assert [s.iteration for s in read_steps(path)] == [1, 2, 3, 4, 5]


def test_a_last_line_cut_by_a_crash_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text(step(1).to_json() + "\n" + step(2).to_json()[:40])
    assert [s.iteration for s in read_steps(path)] == [1]


SPOILED = {
    "a block of NUL bytes": bytes(300) + b"\n",
    "half a sector, and zeros": step(2).to_line()[:60] + bytes(40) + b"\n",
    "two writers' lines, mixed": step(2).to_line()[:40] + step(2).to_line(),
    "bytes of another file": b"\x89PNG\r\x1a\xff\xfe" + step(2).to_line(),
    "no step": b'{"iteration": 2}\n',
}
"""Lines as they are found after a power loss or on a network file system, where that of iteration 2 should be."""


@pytest.mark.parametrize("line", SPOILED.values(), ids=SPOILED)
def test_a_spoiled_line_is_left_out_and_named_and_its_iteration_is_not_shown(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_bytes(step(1).to_line() + line + step(3).to_line())
    spoiled: dict[str, int] = {}
    shown = list(read_steps(path, spoiled))
    assert shown == [step(1), step(3)]
    assert spoiled == {"steps.jsonl:2": 1}
    assert violations(shown) == ["iteration 2 is not shown: steps.jsonl has no readable line of it"]


def test_a_line_behind_a_block_of_nul_bytes_is_read(tmp_path: Path) -> None:
    """An older version appended to a file that ended so."""
    path = tmp_path / "steps.jsonl"
    path.write_bytes(step(1).to_line() + bytes(300) + step(2).to_line() + bytes(300))
    spoiled: dict[str, int] = {}
    assert list(read_steps(path, spoiled)) == [step(1), step(2)]
    assert spoiled == {"steps.jsonl:2": 1, "steps.jsonl:3": 2}


@pytest.mark.parametrize("spoiled", range(1, 10))
@pytest.mark.parametrize("first", [3, 7, 10])
def test_who_goes_on_with_a_spoiled_file_supersedes_what_is_run_again_and_no_more(
    tmp_path: Path, first: int, spoiled: int
) -> None:
    path = tmp_path / "steps.jsonl"
    lines = [bytes(300) + b"\n" if n == spoiled else step(n).to_line() for n in range(1, 10)]
    path.write_bytes(b"".join(lines))
    writer = StepsFile(path, first)
    for iteration in range(first, 12):
        writer.append(step(iteration, epoch=7))
    writer.close()
    made = [(n, 0) for n in range(1, first) if n != spoiled] + [(n, 7) for n in range(first, 12)]
    left_out: dict[str, int] = {}
    assert [(one.iteration, one.epoch) for one in read_steps(path, left_out)] == made
    assert bool(left_out) == (spoiled <= first and spoiled < 10 and spoiled - 1 < first)


def test_who_goes_on_behind_nul_bytes_leaves_them_for_readers_to_know_of(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_bytes(step(1).to_line() + step(2).to_line()[:40] + bytes(300))
    write(path, range(3, 5))
    spoiled: dict[str, int] = {}
    assert [one.iteration for one in read_steps(path, spoiled)] == [1, 3, 4]
    assert spoiled == {"steps.jsonl:2": 1}


def test_a_resumed_run_continues_the_file(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    write(path, range(1, 4))
    write(path, range(4, 6))
    assert [s.iteration for s in read_steps(path)] == [1, 2, 3, 4, 5]
    assert list(tmp_path.iterdir()) == [path]


def test_steps_that_a_resumed_run_repeats_are_superseded_and_the_old_file_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    write(path, range(1, 6))
    path.write_text(path.read_text() + '{"cut')
    write(path, range(4, 7))
    assert [s.iteration for s in read_steps(path)] == [1, 2, 3, 4, 5, 6]
    assert [s.iteration for s in read_steps(tmp_path / "steps.jsonl.1")] == [1, 2, 3, 4, 5]


def bytes_read() -> int:
    """By this process, until now."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.parametrize(("first", "most"), [(None, 1 << 20), (2001, 4 << 20)], ids=["taken over", "resumed"])
def test_going_on_with_a_long_file_costs_a_look_at_a_few_lines(tmp_path: Path, first: int | None, most: int) -> None:
    path = tmp_path / "steps.jsonl"
    last = step(2000, microbatches={0: list(range(4000))}).to_line()  # 23 kB
    path.write_bytes(b"".join(last.replace(b"2000", b"%d" % number, 1) for number in range(1, 2001)) + last[:5000])
    assert path.stat().st_size > 40 << 20
    before = bytes_read()
    file = StepsFile(path, first)
    file.append(step(2000))
    file.append(step(2001))
    file.close()
    assert bytes_read() - before < most
    with path.open("rb") as lines:
        lines.seek(-2 * len(last), 2)
        assert lines.read().endswith(last + step(2001).to_line())
    assert list(tmp_path.iterdir()) == [path]


def test_after_a_rollback_each_writer_goes_on_with_what_was_run_last(tmp_path: Path) -> None:
    """All know that epoch 5 went back to iteration 4, and not whether anybody has written since."""
    path = tmp_path / "steps.jsonl"
    first = StepsFile(path, 1)
    for iteration in range(1, 8):
        first.append(step(iteration, epoch=1))
    first.close()
    for iteration, epoch in ((5, 5), (6, 5), (7, 6)):
        writer = StepsFile(path, 5, since_epoch=5)
        writer.append(step(iteration, epoch=epoch))
        writer.close()
    assert [(one.iteration, one.epoch) for one in read_steps(path)] == [
        (1, 1), (2, 1), (3, 1), (4, 1), (5, 5), (6, 5), (7, 6)
    ]  # fmt: skip
    assert [one.iteration for one in read_steps(tmp_path / "steps.jsonl.1")] == list(range(1, 8))
    assert not (tmp_path / "steps.jsonl.2").exists()


def test_whoever_was_put_out_meanwhile_adds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    may = [True, False]
    file = StepsFile(path, 1, lambda: may[0])
    file.append(step(1))
    may.reverse()
    file.append(step(2))
    file.close()
    assert [s.iteration for s in read_steps(path)] == [1]


def test_whoever_takes_over_adds_only_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    write(path, range(1, 4))
    path.write_bytes(path.read_bytes() + step(4).to_line()[:-1])
    file = StepsFile(path, None)
    for iteration in range(2, 6):
        file.append(step(iteration))
    assert [s.iteration for s in read_steps(path)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("lines", [0, 1, 2, 3, 7, 64])
def test_every_first_iteration_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: int) -> None:
    monkeypatch.setattr(steps, "_BLOCK", 512)
    unit = 1000 // max(lines, 1) ** 2 + 1  # long enough that lines lie across the blocks that are read at a time
    whole = [step(number, microbatches={0: list(range(number * unit))}) for number in range(1, lines + 1)]
    for first in range(1, lines + 2):
        path = tmp_path / str(first) / "steps.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"".join(line.to_line() for line in whole) + b'{"cut')
        file = StepsFile(path, first)
        file.append(step(first))
        file.close()
        assert list(read_steps(path)) == [*whole[: first - 1], step(first)]
        assert path.with_name("steps.jsonl.1").exists() == (first <= lines)


@pytest.mark.parametrize(
    ("microbatches", "problem"),
    [
        ({0: [0, 2], 1: [1, 3]}, None),
        ({0: [3, 1, 2, 0]}, None),
        ({0: [0, 2], 1: [2, 3]}, "[2] were counted more than once"),
        ({0: [0, 2], 1: [3]}, "[1] were not counted"),
        ({0: [], 1: []}, "all were not counted"),
    ],
)
def test_the_audit_finds_what_was_counted_twice_or_not_at_all(
    microbatches: dict[int, list[int]], problem: str | None
) -> None:
    found = audit_problem(step(7, microbatches=microbatches))
    assert found == (problem and f"iteration 7: microbatches {problem}")


def test_the_audit_knows_iterations_that_were_left_out_and_what_they_consumed() -> None:
    def steps(skipped: int, consumed: int) -> list[StepRecord]:
        four = {0: [0, 2], 1: [1, 3]}
        made = [step(iteration, consumed_samples=8 * iteration, microbatches=four) for iteration in (1, 2)]
        return [*made, step(5, consumed_samples=consumed, microbatches=four, skipped=skipped)]

    assert violations(steps(2, 40)) == violations(steps(2, 40), 4) == []
    assert StepRecord.from_json(steps(2, 40)[-1].to_json()).skipped == 2
    assert "skipped" not in steps(2, 40)[0].to_json()
    assert violations(steps(1, 40)) != []
    assert violations(steps(0, 40)) == [not_shown(3, 4)]
    assert violations(list(reversed(steps(0, 40))))[0] == "iteration 2 follows iteration 5 in steps.jsonl"
    assert violations(steps(2, 32)) != []
    assert violations(steps(2, 41)) != []


def test_samples_that_were_left_out_count_as_many_as_the_line_says() -> None:
    """The batch grew from 4 microbatches of 2 samples to 6 in what was left out."""
    four, six = {0: [0, 2], 1: [1, 3]}, {0: [0, 2, 4], 1: [1, 3, 5]}
    made = [step(iteration, consumed_samples=8 * iteration, microbatches=four) for iteration in (1, 2)]

    def last(samples: int, **more: Any) -> StepRecord:
        return step(5, consumed_samples=48, microbatches=six, skipped=2, skipped_samples=samples, **more)

    assert violations([*made, last(20)]) == []
    assert violations([*made, last(18)]) == ["iteration 5: microbatches [6] were not counted"]
    assert StepRecord.from_json(last(20).to_json()) == last(20)
    assert "skipped_samples" not in made[0].to_json()


EIGHT, FOUR = {0: [0, 2, 4, 6], 1: [1, 3, 5, 7]}, {0: [0, 2], 1: [1, 3]}


@pytest.mark.parametrize("stages", [(1, 2), (2, 1), (1, 2, 1)])
def test_each_launch_is_audited_by_its_own_micro_batch_size(tmp_path: Path, stages: tuple[int, ...]) -> None:
    """Each stage goes on from the checkpoint before the last iteration of the one before, and is rolled back once."""
    path = tmp_path / "steps.jsonl"
    first = 1
    for size in stages:
        ids = EIGHT if size == 1 else FOUR
        for begin, epoch in ((first, 1), (first + 2, 5)):
            writer = StepsFile(path, begin, since_epoch=5 if epoch == 5 else None)
            for n in range(begin, first + 5):
                writer.append(step(n, microbatches=ids, micro_batch_size=size, epoch=epoch))
            writer.close()
        first += 3
    made = list(read_steps(path))
    assert [one.iteration for one in made] == list(range(1, first + 2))
    assert {one.micro_batch_size for one in made} == set(stages)
    assert violations(made) == []
    bad = made[-1]
    lost = dataclasses.replace(bad, microbatches={0: [0, 2], 1: [1]} if stages[-1] == 2 else FOUR)
    missing = [3] if stages[-1] == 2 else [4, 5, 6, 7]
    assert violations([*made[:-1], lost]) == [f"iteration {bad.iteration}: microbatches {missing} were not counted"]


def test_of_lines_that_do_not_tell_the_micro_batch_size_most_show_it() -> None:
    """Files of older versions, also where a launch of this version goes on with them."""
    old = [step(n, microbatches=EIGHT) for n in range(1, 4)]
    new = [step(n, microbatches=FOUR, micro_batch_size=2) for n in range(4, 9)]
    assert violations([*old, *new]) == []
    assert violations([*old[:2], step(3, microbatches=FOUR), *new]) == [
        "iteration 3: microbatches [4, 5, 6, 7] were not counted"
    ]
    still = [dataclasses.replace(one, consumed_samples=16) for one in old]
    assert violations(still)[-1] == "iteration 3: 0 samples do not match the counted microbatches"


def test_new_lines_are_read_once_and_never_by_half(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    lines = Lines(path)
    assert lines.new() == (False, [])  # there is no file yet
    path.write_text('{"n": 1}\n{"n": 2}\n{"n"')
    assert lines.new() == (True, [{"n": 1}, {"n": 2}])
    with path.open("a") as file:
        file.write(": 3}\n")
    assert lines.new() == (False, [{"n": 3}])
    assert lines.new() == (False, [])
    path.rename(tmp_path / "steps.jsonl.1")
    path.write_text('{"n": 4}\n')
    assert lines.new() == (True, [{"n": 4}])
    with path.open("a") as file:
        file.write("\0" * 300 + '{"n": 5}\n' + "\0\n")
    assert lines.new() == (False, [{"n": 5}])


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


def test_a_rotation_after_the_death_of_the_writer_that_told_the_start_leaves_the_start_of_the_run(
    tmp_path: Path,
) -> None:
    path = tmp_path / "events.jsonl"
    for launch in (1, 41):
        told = EventsFile(path)
        told.append("start", iteration=launch, worker=0)
        told.close()
    follows = EventsFile(path)
    follows.append("plan", iteration=50, worker=3)
    assert follows._file.flush(DEADLINE)
    assert [event["event"] for event in read_events(path)] == ["start", "start", "plan"]
    path.rename(tmp_path / "events.jsonl.1")
    follows.append("checkpoint", saved=60, worker=3)
    follows.close()
    start, checkpoint = read_events(path)
    assert (start["event"], start["iteration"], checkpoint["event"]) == ("start", 41, "checkpoint")


def test_a_writer_that_follows_another_one_reads_nothing_in_a_pipe_which_has_no_end(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    os.mkfifo(path)
    descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    EventsFile(path).append("plan", epoch=2)
    assert is_ready(descriptor, DEADLINE)
    assert json.loads(os.read(descriptor, 1000))["epoch"] == 2
    os.close(descriptor)


def test_an_event_is_written_where_the_events_before_it_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process without a free descriptor may open the file, and then not a second time."""

    def refuse(*_: object) -> IO[bytes]:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(events, "open", refuse, raising=False)
    file = EventsFile(tmp_path / "events.jsonl")
    file.append("plan", worker=3)
    file.close()
    monkeypatch.undo()
    assert [event["event"] for event in read_events(tmp_path / "events.jsonl")] == ["plan"]


def write_events(path: Path, worker: int) -> None:
    file = EventsFile(path)
    for _ in range(100_000):  # until it is killed; an end, in case the test was
        file.append("plan", worker=worker, text=str(worker) * 3000)


def test_lines_of_many_writers_do_not_mix_and_a_kill_costs_its_writers_last_line_at_most(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    code = (
        "import sys; from tests.run_log import test_steps as t; t.write_events(t.Path(sys.argv[1]), int(sys.argv[2]))"
    )
    # No process of multiprocessing's: its resource tracker would end only after pytest.
    writers = [subprocess.Popen([sys.executable, "-c", code, path, str(n)], cwd=REPOSITORY) for n in range(4)]
    deadline = time.monotonic() + DEADLINE
    while len({event["worker"] for event in read_events(path)}) < 4 and time.monotonic() < deadline:
        time.sleep(0.001)
    for writer in writers:
        writer.kill()
        writer.wait()
    spoiled: list[str] = []
    assert {event["worker"] for event in read_events(path, spoiled)} == set(range(4))
    assert len(spoiled) <= len(writers), "a kill may cut a write that crosses pages; the next line ends it"
    assert all(event["text"] == str(event["worker"]) * 3000 for event in read_events(path))


def test_a_cut_last_line_is_left_out_and_a_spoiled_one_before_it_is_named(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert list(read_events(path)) == []
    good = '{"event": "end", "time": 1.5}\n'
    path.write_text(good + '{"event": "en')
    assert list(read_events(path)) == [{"event": "end", "time": 1.5}]
    for bad in ('{"event": "end"}\n', "[]\n", '{"event": 1, "time": 1}\n', "junk\n", "\0" * 300 + "\n", '{"ev\n'):
        path.write_text(good + bad + "\n" + good)
        spoiled: list[str] = []
        assert list(read_events(path, spoiled)) == 2 * [{"event": "end", "time": 1.5}]
        assert spoiled == ["events.jsonl:2"]
        lines = Lines(path)
        assert [line for line in lines.new()[1] if line.get("event") == "end" and "time" in line] == list(
            read_events(path)
        )


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
