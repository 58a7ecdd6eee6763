"""The report of a run: what it says, and that a run which broke the invariant does not pass."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Protocol

import pytest

from recover_megatron.report.full import without_page as main
from recover_megatron.run_log.steps import StepRecord, microbatches_per_iteration, violations
from tests.report.synthetic import write_lines, write_steps

M = 6


def step(iteration: int, **changes: object) -> StepRecord:
    good = StepRecord(
        iteration=iteration,
        loss=4.0 / iteration,
        grad_norm=1.0,
        consumed_samples=12 * iteration,
        epoch=0,
        replicas=2,
        seconds=0.25,
        microbatches={0: [0, 2, 4], 1: [1, 3, 5]},
    )
    return dataclasses.replace(good, **changes)  # type: ignore[arg-type]


GOOD = [step(n) for n in range(1, 9)]


class Summary(Protocol):
    """What the command says of a folder, on stdout and on stderr; ``code``: the exit status that it must have."""

    def __call__(self, folder: Path, *options: object, code: int = 0) -> str: ...


@pytest.fixture
def summary(capsys: pytest.CaptureFixture[str]) -> Summary:
    def said(folder: Path, *options: object, code: int = 0) -> str:
        assert main([str(folder), "--no-plot", *map(str, options)]) == code
        return "".join(capsys.readouterr())

    return said


def test_uneven_quotas_of_fewer_replicas_are_no_violation() -> None:
    later = step(9, epoch=1, replicas=1, microbatches={1: [3, 5, 1, 0, 2, 4]})
    assert violations([*GOOD, later]) == []
    assert microbatches_per_iteration(GOOD) == M


def test_a_batch_size_that_changes_by_design_is_no_violation_but_a_lost_id_in_it_is() -> None:
    grown = step(9, consumed_samples=12 * 8 + 16, microbatches={0: [0, 2, 4, 6], 1: [1, 3, 5, 7]})
    assert violations([*GOOD, grown]) == []
    lost = dataclasses.replace(grown, microbatches={0: [0, 2, 4, 6], 1: [1, 3, 5]})
    assert violations([*GOOD, lost]) == ["iteration 9: microbatches [7] were not counted"]


def test_highest_ids_missing_from_every_iteration_show_against_the_samples() -> None:
    lossy = [dataclasses.replace(s, microbatches={0: [0, 2, 4], 1: [1, 3]}) for s in GOOD]
    assert violations(lossy)[0] == "iteration 2: 12 samples do not match the counted microbatches"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"microbatches": {0: [0, 4], 1: [1, 3, 5]}}, "iteration 9: microbatches [2] were not counted"),
        ({"microbatches": {0: [0, 2, 4], 1: [1, 3]}}, "iteration 9: microbatches [5] were not counted"),
        (
            {"microbatches": {0: [0, 2, 4], 1: [1, 3, 5, 2]}},
            "iteration 9: microbatches [2] were counted more than once",
        ),
        ({"microbatches": {}}, "iteration 9: microbatches all were not counted"),
        ({"consumed_samples": 9 * 12 - 1}, "iteration 9: 11 samples are not a whole number of microbatches of 2"),
        ({"consumed_samples": 9 * 12 - 2}, "iteration 9: microbatches [5] were counted, but the last one is 4"),
        ({"iteration": 8}, "iteration 8 follows iteration 8"),
    ],
)
def test_each_kind_of_violation_is_found_and_named(
    tmp_path: Path, summary: Summary, changes: dict[str, object], said: str
) -> None:
    steps = [*GOOD, dataclasses.replace(step(9), **changes)]  # type: ignore[arg-type]
    assert violations(steps)[0].startswith(said)
    told = summary(write_steps(tmp_path, steps), code=1)
    assert f"NOT each counted exactly once: {said}" in told
    assert f"\nrecover-report: {said}" in told


def test_ids_missing_from_every_iteration_are_found_where_their_number_is_known(
    tmp_path: Path, summary: Summary
) -> None:
    assert violations(GOOD, expected=7)[0] == "iteration 1: microbatches [6] were not counted"
    assert violations(GOOD, expected=5)[0] == "iteration 1: microbatches [5] were counted, but the last one is 4"
    (tmp_path / "run.json").write_text('{"microbatches": 7}')
    summary(write_steps(tmp_path, GOOD), code=1)
    summary(tmp_path, "--microbatches", 6)


def test_a_last_line_cut_by_a_crash_is_left_out_and_a_spoiled_one_before_it_is_named(
    tmp_path: Path, summary: Summary
) -> None:
    assert "8 (1 to 8)" in summary(write_steps(tmp_path, GOOD, end=step(9).to_json()[:40]))
    told = summary(write_steps(tmp_path, GOOD, end="{}\n" + step(10).to_json() + "\n"), code=1)
    assert "left out        1 damaged line (NUL bytes, half a line, or two mixed): steps.jsonl:9" in told
    assert "NOT proven completely: iteration 9 is not shown" in told
    assert "counted exactly once" not in told
    told = summary(write_steps(tmp_path, [*GOOD, step(9)], end="{}\n" + step(10).to_json() + "\n"))
    assert "steps.jsonl:10" in told, "the iteration of the spoiled line was run again"


@pytest.mark.parametrize("spoiled", ["\0" * 300, '{"iteration": 9, "lo\0\0', "\0\n"])
def test_what_may_have_followed_the_last_line_is_not_shown(tmp_path: Path, summary: Summary, spoiled: str) -> None:
    told = summary(write_steps(tmp_path, GOOD, end=spoiled), code=1)
    assert "NOT proven completely: iterations after 8 are not shown" in told
    assert "iterations after 0 are not shown" in summary(write_steps(tmp_path, [], end=spoiled), code=1)


def test_spoiled_lines_of_every_file_cost_nobody_the_report(tmp_path: Path, summary: Summary) -> None:
    write_steps(tmp_path, GOOD)
    for name in ("events.jsonl", "events-0.jsonl", "chaos.jsonl"):
        (tmp_path / name).write_bytes(b"\xff\xfe\n" + bytes(300))
    for name in ("workers.json", "corpus.json", "run.json"):
        (tmp_path / name).write_bytes(bytes(300))
    told = summary(tmp_path)
    assert "8 (1 to 8)" in told
    assert (
        "9 damaged lines (NUL bytes, half a line, or two mixed): events-0.jsonl:1, events-0.jsonl:2, events.jsonl:1, "
        "events.jsonl:2, chaos.jsonl:1, chaos.jsonl:2, corpus.json, workers.json, ..."
    ) in told


def test_iterations_that_log_rotation_has_taken_are_not_shown(tmp_path: Path, summary: Summary) -> None:
    timed = [dataclasses.replace(one, time=100.0 + one.iteration) for one in GOOD]

    def of(first: int, starts: list[tuple[int, float]], code: int) -> str:
        write_lines(
            tmp_path / "events.jsonl",
            [{"event": "start", "time": at, "iteration": n, "replicas": [0, 1], "worker": 0} for n, at in starts],
        )
        return summary(write_steps(tmp_path, timed[first - 1 :]), code=code)

    assert "NOT proven completely: iterations 1 to 4 are not shown" in of(5, [(1, 100.0)], 1)
    assert "goodput" not in of(5, [(1, 100.0)], 1), "time of which nothing is known is no time without work"
    assert "goodput" in of(5, [(5, 104.0)], 0), "a run that goes on from a checkpoint of another folder"
    of(5, [(1, 50.0), (5, 104.0)], 0)  # the first launch committed nothing
    assert "NOT proven completely: iterations 1 to 4 are not shown" in of(5, [], 1), "the start was rotated away, too"
    of(5, [(1, 50.0), (5, 200.0)], 0)  # by a host whose clock is ahead
    (tmp_path / "events.jsonl").unlink()
    summary(tmp_path)  # steps.jsonl alone was copied
    of(5, [(1, 50.0), (5, 104.0)], 0)
    (tmp_path / "steps.jsonl").write_bytes(bytes(300) + b"\n" + (tmp_path / "steps.jsonl").read_bytes())
    assert "NOT proven completely: iterations 1 to 4 are not shown" in summary(tmp_path, code=1)


@pytest.mark.parametrize("told", ["end", "checkpoint"])
def test_iterations_of_an_earlier_launch_that_log_rotation_has_taken_are_not_shown(
    tmp_path: Path, summary: Summary, told: str
) -> None:
    """Both files were rotated after it; or the earlier launch has made nothing, which is no reason for an alarm."""

    def of(first: int, events: list[tuple[str, int]], code: int) -> str:
        common = {"replicas": [0, 1], "worker": 0}
        lines = [
            {"event": event, "time": 100.0 + at, "iteration": n, "saved": n, **common}
            for at, (event, n) in enumerate(events)
        ]
        write_lines(tmp_path / "events.jsonl", lines)
        timed = [dataclasses.replace(one, time=200.0 + one.iteration) for one in GOOD]
        return summary(write_steps(tmp_path, timed[first - 1 :]), code=code)

    both = [("start", 1), (told, 4), ("start", 5)]
    assert "NOT proven completely: iterations 1 to 4 are not shown" in of(5, both, 1)
    assert "iterations 1 to 6 are not shown" in of(7, both, 1)
    of(1, both, 0)
    of(5, [("start", 1), ("start", 5)], 0)
    of(5, [("start", 5), (told, 4), ("start", 5)], 0)  # nothing was left to train
    of(5, [("start", 5), (told, 8)], 0)


def test_iterations_that_the_end_of_the_run_tells_of_and_no_line_are_not_shown(
    tmp_path: Path, summary: Summary
) -> None:
    """The last lines of steps.jsonl were lost: by a full disk, or with the power of a host."""

    def of(events: list[tuple[str, int]], code: int, lines: int = len(GOOD)) -> str:
        told = [
            {"event": event, "time": 100.0 + at, "iteration": n, "replicas": [0, 1], "worker": 0}
            for at, (event, n) in enumerate(events)
        ]
        write_lines(tmp_path / "events.jsonl", told)
        return summary(write_steps(tmp_path, GOOD[:lines]), code=code)

    last = GOOD[-1].iteration
    of([("start", 1), ("end", last)], 0)
    assert f"iterations {last + 1} to {last + 3} are not shown" in of([("start", 1), ("end", last + 3)], 1)
    assert f"iterations 1 to {last} are not shown" in of([("start", 1), ("end", last)], 1, lines=0)
    of([("start", 1), ("end", last + 3), ("start", last + 1)], 0)  # a launch that still runs
    of([("start", 1), ("end", last), ("start", last + 90), ("end", last + 89)], 0)  # nothing was left to train


def test_the_summary_has_the_losses_beside_the_unigram_entropy(tmp_path: Path, summary: Summary) -> None:
    write_steps(tmp_path, [*GOOD, step(9, epoch=1, replicas=1, microbatches={1: [0, 1, 2, 3, 4, 5]}, loss=None)])
    (tmp_path / "corpus.json").write_text(json.dumps({"unigram_entropy_nats": {"valid_under_train": 3.25}}))
    (tmp_path / "run.json").write_text(json.dumps({"seq_length": 100, "exit_code": 0}))
    workers = [{"worker_id": n, "state": state} for n, state in enumerate(("finished", "killed", "finished"))]
    (tmp_path / "workers.json").write_text(json.dumps(workers))
    (tmp_path / "worker-1.log").write_bytes(
        b"\xff junk\n validation loss at iteration 4 on validation set | lm loss value: 2.5E+00 | lm loss PPL: 12 |\n"
        b" validation loss at iteration 8 on validation set | lm loss value: 1.5E+00 | lm loss PPL: 4 |\n"
        b" validation loss at iteration 8 on test set | lm loss value: 1.75E+00 | lm loss PPL: 5 |\n"
    )
    said = summary(tmp_path)
    for line in (
        "108 samples = 10,800 tokens",
        "2, 1 from iteration 9 (2 epochs)",
        "3: 2 finished, 1 killed (worker 1)",
        "first loss      4.0000 nats (5.771 bits)",
        "1.3589 nats (1.961 bits) per token, mean of the last 8 iterations",  # 4 * (1 + 1/2 + ... + 1/8) / 8
        "validation loss 1.5000 nats",
        "test loss       1.7500 nats",
        "unigram entropy 3.2500 nats",
        "each of 0..5 was counted exactly once",
        "exit code       0",
    ):
        assert line in said


def test_the_summary_says_what_was_run_twice(tmp_path: Path, summary: Summary) -> None:
    carried_out = [{"to": 4, "tier": "disk", "lost": 1}, {"to": 2, "tier": "memory", "lost": 2}]
    planned = {"event": "plan", "rollback": {"iteration": 5, "source": "save", "lost": 1}}  # nobody could read it
    backs = [planned, *({"event": "rolled back", **its} for its in carried_out)]
    write_lines(tmp_path / "events.jsonl", [{"time": 1.0, "worker": 0, **its} for its in backs])
    told = (
        "rolled back     to 4 from disk (iteration 5 run again), to 2 from memory (iterations 3 to 4 run again); "
        "3 iterations lost; their first runs are in steps.jsonl.1, ..."
    )
    assert told in summary(write_steps(tmp_path, GOOD))
    backs = [{"event": "rolled back", "time": 1.0, "worker": 0, "to": 8, "tier": "disk", "lost": 0}]
    write_lines(tmp_path / "events.jsonl", backs)
    told = "rolled back     to 8 from disk (no iteration run again); 0 iterations lost\n"
    assert told in summary(write_steps(tmp_path, GOOD)), "no file is named that there is not"


def test_of_many_changes_of_the_replicas_the_first_and_the_last_are_told(tmp_path: Path, summary: Summary) -> None:
    said = summary(write_steps(tmp_path, [step(n, replicas=20 - n, epoch=n) for n in range(1, 13)]))
    assert next(line for line in said.splitlines() if line.startswith("replicas")) == (
        "replicas        19, 18 from iteration 2, 17 from iteration 3, 16 from iteration 4, 15 from iteration 5, "
        "... (3 more changes), 11 from iteration 9, 10 from iteration 10, 9 from iteration 11, 8 from iteration 12 "
        "(12 epochs)"
    )


def test_what_is_no_run_is_told_without_a_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "nowhere")]) == 2
    assert main([str(tmp_path)]) == 2
    write_steps(tmp_path, GOOD)
    assert main([str(tmp_path), "--corpus", str(tmp_path / "no.json")]) == 2
    for content in ("{", "[]"):
        (tmp_path / "corpus.json").write_text(content)
        assert main([str(tmp_path), "--corpus", str(tmp_path / "corpus.json")]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 5
    assert all(line.startswith("recover-report: error: ") for line in said)


def test_a_run_without_a_step_is_told_and_not_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(write_steps(tmp_path, []))]) == 0
    assert "none committed" in capsys.readouterr().out
    assert not (tmp_path / "loss.png").exists()


def test_the_loss_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "corpus.json").write_text(json.dumps({"unigram_entropy_nats": {"valid_under_train": 3.25}}))
    write_steps(tmp_path, [*GOOD, step(9, replicas=1, microbatches={1: [0, 1, 2, 3, 4, 5]})])
    assert main([str(tmp_path)]) == 0
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
