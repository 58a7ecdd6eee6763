"""quickstart.py: the command it builds, the folder it cleans, the launcher that it starts and ends, what it claims.

The launcher is a stand-in: a program that writes steps.jsonl.  The slow test at the end has the real one.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import prepare_corpus
import psutil
import pytest
import quickstart
from lib.progress import Progress, describe, recoveries

from recover_megatron.run_log.events import Lines
from recover_megatron.run_log.steps import StepRecord
from tests.harness.patience import patient
from tests.harness.waiting import DEADLINE

SCRIPTS = Path(quickstart.__file__).parent

LAUNCHER = """
import json, pathlib, sys, time
folder, steps, status = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
with open(folder / "steps.jsonl", "a") as file:
    for t in range(1, steps + 1):
        file.write(json.dumps(dict(iteration=t, loss=3.0, grad_norm=1.0, consumed_samples=16 * t, epoch=0, replicas=4,
            seconds=0.1, microbatches={str(r): [r, r + 4] for r in range(4)})) + "\\n")
        file.flush()
print("the launcher's last words", flush=True)
if status == "wait":
    time.sleep(600)
sys.exit(int(status))
"""

# Runs quickstart.main with the stand-in: argv is FOLDER STEPS STATUS, then quickstart's own.
DRIVER = """
import sys, pathlib
sys.path.insert(0, {scripts!r})
import quickstart
launcher, folder, steps, status = sys.argv[1:5]
quickstart.corpus_of = lambda path: {{"megatron_flags": [], "unigram_entropy_nats": {{"valid_under_train": 3.0}}}}
made = quickstart.training_command
quickstart.training_command = lambda args, run, flags, fault: (
    [sys.executable, launcher, folder, steps, status, *made(args, run, flags)[1:]])
sys.exit(quickstart.main(["--out", folder, "--no-failure", *sys.argv[5:]]))
"""


def start(tmp_path: Path, steps: int, status: str) -> subprocess.Popen[str]:
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    (tmp_path / "driver.py").write_text(DRIVER.format(scripts=str(SCRIPTS)))
    paths = [str(tmp_path / name) for name in ("driver.py", "launcher.py", "run")]
    return subprocess.Popen(
        [sys.executable, *paths, str(steps), status, "--iters", "4"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(SCRIPTS.parent)},
    )  # fmt: skip


def options(*arguments: str) -> argparse.Namespace:
    return quickstart.parser().parse_args(list(arguments))


def test_every_worker_gets_the_same_number_of_microbatches() -> None:
    workers = (1, 2, 3, 4, 5, 16)
    assert [quickstart.microbatches(n) for n in workers] == [8, 8, 9, 8, 10, 16]


def test_the_users_flags_come_last_and_are_what_the_report_is_told(tmp_path: Path) -> None:
    args = options("--iters", "30", "--workers", "2", "--", "--global-batch-size", "64", "--seq-length", "32")
    command = quickstart.training_command(args, tmp_path, ["--vocab-size", "257"])
    assert command[-4:] == ["--global-batch-size", "64", "--seq-length", "32"]
    assert command[command.index("--train-iters") + 1] == "30"
    settings = quickstart.settings_of(command)
    assert settings["microbatches"] == 64 // quickstart.MICRO_BATCH
    assert settings["seq_length"] == 32
    assert settings["iterations"] == 30


def refused(tmp_path: Path, reason: str, resume: bool = False) -> None:
    with pytest.raises(quickstart.Stop, match=reason):
        quickstart.claim(tmp_path, resume=resume)


def test_a_former_run_is_cleared_and_anything_else_or_another_ones_is_left(tmp_path: Path) -> None:
    for name in ("run.json", "steps.jsonl", "checkpoint/iter_0000001/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    quickstart.claim(tmp_path, resume=False).close()
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    with (tmp_path / ".lock").open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        refused(tmp_path, "another quickstart")
    (tmp_path / "thesis.tex").touch()
    refused(tmp_path, "not from a quickstart")
    assert (tmp_path / "thesis.tex").exists()


def test_of_a_resumed_run_only_the_iterations_after_its_checkpoint_are_shown(tmp_path: Path) -> None:
    def write(count: int) -> None:
        steps = [StepRecord(n, 3.0, 1.0, 16 * n, 0, 1, 0.1, {0: [0]}) for n in range(1, count + 1)]
        (tmp_path / "steps.jsonl").write_text("".join(step.to_json() + "\n" for step in steps))

    write(8)
    lines = Lines(tmp_path / "steps.jsonl")
    lines.new()
    (tmp_path / "steps.jsonl").rename(tmp_path / "steps.jsonl.1")
    write(4)
    assert quickstart.new_steps(lines, 4) == []
    write(6)
    assert [step.iteration for step in quickstart.new_steps(lines, 4)] == [5, 6]


def test_resuming_needs_a_checkpoint_and_keeps_the_folder_and_any_run_needs_a_whole_corpus(tmp_path: Path) -> None:
    refused(tmp_path, "no checkpoint", resume=True)
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "latest_checkpointed_iteration.txt").write_text("250")
    (tmp_path / "steps.jsonl").touch()
    quickstart.claim(tmp_path, resume=True).close()
    assert (tmp_path / "steps.jsonl").exists()
    assert quickstart.checkpointed(tmp_path) == 250
    command = quickstart.training_command(options("--resume"), tmp_path, [])
    assert command[command.index("--load") + 1] == str(tmp_path / "checkpoint")
    with pytest.raises(quickstart.Stop, match="prepare_corpus"):
        quickstart.corpus_of(tmp_path)


@pytest.mark.slow
def test_a_failed_run_ends_with_the_launchers_last_words_and_its_exit_code(tmp_path: Path) -> None:
    process = start(tmp_path, 2, "7")
    out, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 7, err
    assert "exit code       7" in out
    assert "the launcher's last words" in err
    assert "exit code 7" in err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_training_too(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path, 1, "wait")
    assert process.stdout is not None
    for line in process.stdout:
        if "1/4" in line:  # it is running
            break
    process.send_signal(number)
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 128 + number
    assert "stopping the training" in err
    with (tmp_path / "run" / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert not [command for command in commands if str(tmp_path / "launcher.py") in command[1:2]]


def test_under_nohup_the_end_of_a_terminal_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[object] = []
    monkeypatch.setattr(quickstart, "quickstart", lambda args: found.append(signal.getsignal(signal.SIGHUP)) or 0)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGHUP, signal.SIGTERM)}
    try:
        assert quickstart.main([]) == 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert found == [signal.SIG_IGN]


def test_options_that_make_no_sense_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        quickstart.main(["--workers", "0"])
    assert "must be 1 or more" in capsys.readouterr().err


def test_the_table_has_a_line_now_and_then_with_the_mean_since_the_last_one() -> None:
    progress = Progress(iterations=100, reference=4.0, rows=25)
    steps = [StepRecord(n, float(n % 2 * 2), 1.0, n, 0, 4, 0.5, {}) for n in range(1, 101)]
    lines = list(progress.lines(steps))
    assert len(lines) == 26  # the first, and each fourth
    assert lines[0].split()[:2] == ["1/100", "2.000"]
    assert lines[2].split()[:4] == ["8/100", "1.000", "500", "0:46"]


@pytest.mark.parametrize("loss", [None, float("nan"), float("inf"), 1e30])
def test_a_loss_that_is_no_number_does_not_break_the_table(loss: float | None) -> None:
    assert list(Progress(1, 3.0, 25).lines([StepRecord(1, loss, None, 2, 0, 1, 0.5, {0: [0]})]))


# ---- the death


def test_a_worker_is_killed_unless_it_would_be_the_only_one_or_the_user_does_not_want_it(tmp_path: Path) -> None:
    assert quickstart.victims_iteration(options("--iters", "200")) == 80
    assert quickstart.victims_iteration(options("--iters", "1")) == 1
    for words in (["--no-failure"], ["--resume"], ["--workers", "1"]):
        assert quickstart.victims_iteration(options(*words)) is None
    command = quickstart.training_command(options(), tmp_path, [], 80)
    assert command[command.index("--recover-inject") + 1] == "1@80:backward:kill"
    reference = quickstart.training_command(options(), tmp_path, [], save=False)
    assert "--recover-inject" not in reference
    assert "--save" not in reference


FAULT = 3


def two_runs(
    tmp_path: Path, *, died: int | None = 9, fewer: int = 3, norm: float = 1.0, samples: int = 16
) -> tuple[Path, Path]:
    """Log folders of a run in which worker 1 died in iteration ``FAULT`` and of its reference."""
    run, reference = tmp_path / "run", tmp_path / "run" / "reference"
    reference.mkdir(parents=True)
    usual = [StepRecord(t, 3.0, 1.0, 16 * t, 1, 4, 0.1, {0: [0]}) for t in range(1, 6)]
    changed = [StepRecord(t, 3.0, norm, samples * t, 1, fewer, 0.1, {0: [0]}) for t in range(FAULT, 6)]
    for folder, steps in ((run, usual[: FAULT - 1] + changed), (reference, usual)):
        (folder / "steps.jsonl").write_text("".join(step.to_json() + "\n" for step in steps))
    (run / "workers.json").write_text(json.dumps([{"worker_id": 1, "state": "running", "signal": died}]))
    return run, reference


def test_what_the_death_changed_is_told_where_it_is_rounding_only(tmp_path: Path) -> None:
    text = "\n".join(quickstart.compare_runs(*two_runs(tmp_path, norm=1 + 1e-7), FAULT))
    assert "before iteration 3: grad norm at most 0.0e+00" in text
    assert "with the death: loss 0.0e+00, grad norm 1.0e-07" in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"norm": 1.01}, "another order of additions cannot change more than"),
        ({"norm": float("nan")}, "another order of additions cannot change more than"),
        ({"died": None}, "was not killed"),
        ({"fewer": 4}, "did not finish that step"),
        ({"samples": 14}, "cannot be compared"),
    ],
)
def test_a_death_that_did_not_happen_or_changed_more_than_rounding_is_no_success(
    tmp_path: Path, change: dict[str, float], words: str
) -> None:
    with pytest.raises(quickstart.Stop, match=words):
        quickstart.compare_runs(*two_runs(tmp_path, **change), FAULT)  # type: ignore[arg-type]


def test_a_recovery_is_told_as_it_happens_and_a_half_written_line_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "plan", "lost_workers": [7], "iteration": 1, "epoch": 2, "replicas": [0]}\n')
    events = Lines(path)
    events.new()
    plan = {"event": "plan", "iteration": 9, "epoch": 3, "replicas": [0, 2], "spares": [], "lost_workers": [1]}
    whole = json.dumps(plan)
    with path.open("a") as file:
        file.write(whole[:20])
        file.flush()
        assert list(recoveries(events)) == []
        file.write(whole[20:] + "\n")
    assert list(recoveries(events)) == ["    >>>  iteration 9: worker 1 lost; epoch 3 continues with replicas 0, 2"]
    assert list(recoveries(events)) == []


def test_the_start_is_no_recovery_and_one_says_who_ran_what_again() -> None:
    assert describe({"event": "plan", "iteration": 1, "epoch": 1, "replicas": [0, 1], "lost_workers": []}) is None
    recovery = {"event": "recovery", "iteration": 9, "epoch": 3, "reran": {"0": [1], "2": [5, 6]}}
    plan = {"event": "plan", "iteration": 7, "epoch": 5, "grid": {"0": [2, 4], "1": [1, 3]}, "fresh": [0]}
    assert describe(plan) == "iteration 7: epoch 5 adds replica 0 of workers [2, 4]"
    assert describe({**recovery, "seconds": {"rendezvous": 0.0244, "rerun": 1.5}}) == (
        "iteration 9: run again: microbatch 1 by replica 0, microbatches 5, 6 by replica 2; "
        "finished (rendezvous 24 ms, rerun 1500 ms)"
    )


@pytest.mark.slow
def test_the_quickstart_kills_a_worker_finishes_its_step_and_shows_that_nothing_else_changed(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for number in range(20):
        (text / f"{number}.txt").write_text(f"document {number}: " + "the quick brown fox jumps over the dog. " * 40)
    assert prepare_corpus.main(["--input", str(text), "--out", str(tmp_path / "corpus")]) == 0
    run = tmp_path / "run"
    command = [sys.executable, str(SCRIPTS / "quickstart.py"), "--iters", "5", "--workers", "2", "--out", str(run)]
    process = subprocess.run(
        [*command, "--corpus", str(tmp_path / "corpus"), "--", "--num-layers", "1", "--hidden-size", "32"],
        capture_output=True, text=True, timeout=patient(600), env={**os.environ, "PYTHONPATH": str(SCRIPTS.parent)},
    )  # fmt: skip
    assert process.returncode == 0, process.stdout + process.stderr
    assert re.search(r"(?m)iteration 2: worker 1 lost; epoch \d+ continues with replica 0$", process.stdout)
    assert re.search(r"     5/5 +\d\.\d{3} ", process.stdout)
    for said in (
        "run again", "2, 1 from iteration 2", "each of 0..7 was counted exactly once", "exit code       0",
        "largest relative difference of the loss", "iteration 2, with the death", "console.log",
    ):  # fmt: skip
        assert said in process.stdout
    assert "audit" in (run / "report.html").read_text().lower()
