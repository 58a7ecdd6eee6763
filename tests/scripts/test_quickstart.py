"""quickstart.py: the command it builds, the folder it cleans, the launcher that it starts and ends.

The launcher is a stand-in: a program that writes steps.jsonl.  The real one is run by quickstart.sh itself.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import quickstart
from lib.progress import Progress

from recover_megatron.report.steps import Step

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
quickstart.training_command = lambda args, run, flags: (
    [sys.executable, launcher, folder, steps, status, *made(args, run, flags)[1:]])
sys.exit(quickstart.main(["--out", folder, *sys.argv[5:]]))
"""


def start(tmp_path: Path, steps: int, status: str, *arguments: str) -> subprocess.Popen[str]:
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    (tmp_path / "driver.py").write_text(DRIVER.format(scripts=str(SCRIPTS)))
    command = ["driver.py", "launcher.py", "run", str(steps), status, *arguments]
    command = [str(tmp_path / word) if word in ("driver.py", "launcher.py", "run") else word for word in command]
    return subprocess.Popen(
        [sys.executable, *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SCRIPTS.parent)},
    )


def options(*arguments: str) -> object:
    args = quickstart.parser().parse_args(list(arguments))
    args.megatron = []
    return args


@pytest.mark.parametrize(("workers", "expected"), [(1, 8), (2, 8), (3, 9), (4, 8), (5, 10), (16, 16)])
def test_every_worker_gets_the_same_number_of_microbatches(workers: int, expected: int) -> None:
    assert quickstart.microbatches(workers) == expected
    assert expected % workers == 0


def test_the_users_flags_come_last_and_are_what_the_report_is_told(tmp_path: Path) -> None:
    args = options("--iters", "30", "--workers", "2")
    args.megatron = ["--global-batch-size", "64", "--seq-length", "32"]  # type: ignore[attr-defined]
    command = quickstart.training_command(args, tmp_path, ["--vocab-size", "257"])
    assert command[-4:] == ["--global-batch-size", "64", "--seq-length", "32"]
    assert command[command.index("--train-iters") + 1] == "30"
    settings = quickstart.settings_of(command)
    assert settings["microbatches"] == 64 // quickstart.MICRO_BATCH
    assert settings["seq_length"] == 32
    assert settings["iterations"] == 30


def test_a_former_run_is_cleared_and_anything_else_is_left(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for name in ("run.json", "steps.jsonl", "checkpoint/iter_0000001/x"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).touch()
    quickstart.claim(run, resume=False).close()
    assert [path.name for path in run.iterdir()] == [".lock"]
    (run / "thesis.tex").touch()
    with pytest.raises(quickstart.Stop, match="no quickstart run"):
        quickstart.claim(run, resume=False)
    assert (run / "thesis.tex").exists()


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    with (tmp_path / ".lock").open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(quickstart.Stop, match="another quickstart"):
            quickstart.claim(tmp_path, resume=False)
    quickstart.claim(tmp_path, resume=False).close()


def test_resuming_needs_a_checkpoint_and_keeps_the_folder(tmp_path: Path) -> None:
    with pytest.raises(quickstart.Stop, match="no checkpoint"):
        quickstart.claim(tmp_path, resume=True)
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "latest_checkpointed_iteration.txt").write_text("250")
    (tmp_path / "steps.jsonl").touch()
    quickstart.claim(tmp_path, resume=True).close()
    assert (tmp_path / "steps.jsonl").exists()
    assert quickstart.checkpointed(tmp_path) == 250
    command = quickstart.training_command(options("--resume"), tmp_path, [])
    assert command[command.index("--load") + 1] == str(tmp_path / "checkpoint")


def test_a_corpus_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    with pytest.raises(quickstart.Stop, match="prepare_corpus"):
        quickstart.corpus_of(tmp_path)


def test_a_run_shows_progress_and_ends_with_the_summary(tmp_path: Path) -> None:
    process = start(tmp_path, 4, "0", "--iters", "4")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "     4/4      3.000" in out
    assert "each of 0..7 was counted exactly once" in out
    assert "exit code       0" in out
    assert "console.log" in out


def test_a_failed_training_is_told_with_its_last_words_and_its_exit_code(tmp_path: Path) -> None:
    process = start(tmp_path, 2, "7", "--iters", "4")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 7
    assert "the launcher's last words" in err
    assert "exit code 7" in err
    assert "exit code       7" in out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_training_too(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path, 1, "wait", "--iters", "4")
    assert process.stdout is not None
    for line in process.stdout:
        if "1/4" in line:  # it is running
            break
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 128 + number
    assert "stopping the workers" in err
    with (tmp_path / "run" / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert not [command for command in commands if str(tmp_path / "launcher.py") in command[1:2]]


def test_options_that_make_no_sense_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        quickstart.main(["--workers", "0"])
    assert "must be 1 or more" in capsys.readouterr().err


def test_the_table_has_a_line_now_and_then_with_the_mean_since_the_last_one() -> None:
    progress = Progress(iterations=100, reference=4.0)
    steps = [Step(n, float(n % 2 * 2), 1.0, n, 0, 4, 0.5, {}) for n in range(1, 101)]
    lines = list(progress.lines(steps))
    assert len(lines) == 26  # the first, and each fourth
    assert lines[0].split()[:2] == ["1/100", "2.000"]
    assert lines[2].split()[:4] == ["8/100", "1.000", "500", "0:46"]


@pytest.mark.parametrize("loss", [None, float("nan"), float("inf"), 1e30])
def test_a_loss_that_is_no_number_does_not_break_the_table(loss: float | None) -> None:
    assert list(Progress(1, 3.0).lines([Step(1, loss, None, 2, 0, 1, 0.5, {0: [0]})]))
