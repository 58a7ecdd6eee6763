"""What the shipped scripts decide, without a SLURM: which ends are requeued and how often; and their five lines."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.harness.processes import finished
from tests.slurm.cluster import SCRIPTS, WORKERS_FLAG, edited

TEXT = (SCRIPTS / "recover.sbatch").read_text()


class Script:
    """The functions of recover.sbatch, with commands of SLURM's that only note how they were called."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, folder / "run"
        (self.run / "ends").mkdir(parents=True)
        (self.run / "checkpoint").mkdir()
        for command in ("scontrol", "scancel"):
            stub = folder / command
            stub.write_text(f'#!/bin/sh\necho {command} "$@" >>{folder}/calls\n')
            stub.chmod(0o755)

    def call(self, what: str, **variables: str) -> subprocess.CompletedProcess[str]:
        body, _, last = TEXT.rstrip().rpartition("\n")
        assert last == "main"
        environment = {
            "PATH": f"{self.folder}:{os.environ['PATH']}",
            "RUN_DIR": str(self.run),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NAME": "recover",
            "SLURM_SUBMIT_DIR": str(self.folder),
        }
        return finished("bash", "-c", f"{body}\n{what}", **environment | variables)

    def finish(self, code: int, time_is_up: str = "", **variables: str) -> int:
        return self.call(f"finish {code} '{time_is_up}'", **variables).returncode

    def checkpoint(self, iteration: int) -> None:
        (self.run / "checkpoint" / "latest_checkpointed_iteration.txt").write_text(str(iteration))

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return Script(tmp_path)


@pytest.mark.parametrize("name", sorted(WORKERS_FLAG))
def test_five_lines_are_edited_and_the_script_is_one_of_bash(name: str, tmp_path: Path) -> None:
    values = {"nodes": 2, "workers_flag": "--x", "workers": 1, "venv": "/v", "data": "--mock-data", "flags": "--y"}
    path = tmp_path / name
    path.write_text(edited(name, **values))
    subprocess.run(["bash", "-n", str(path)], check=True)
    lines, before = path.read_text().splitlines(), (SCRIPTS / name).read_text().splitlines()
    assert sum(new != old for new, old in zip(lines, before, strict=True)) == 5
    # sbatch reads no option after the first command.
    first_command = next(n for n, line in enumerate(lines) if line and not line.startswith("#"))
    assert not [line for line in lines[first_command:] if line.startswith("#SBATCH")]


@pytest.mark.parametrize("code", [10, 11, 12])
def test_a_verdict_on_the_run_is_requeued_a_bounded_number_of_times(script: Script, code: int) -> None:
    script.checkpoint(500)
    assert [script.finish(code, MAX_REQUEUES="2") for _ in range(4)] == [0, 0, code, code]
    assert script.calls == ["scontrol requeue 7"] * 2


def test_a_new_checkpoint_begins_the_count_anew(script: Script) -> None:
    script.checkpoint(500)
    assert [script.finish(10, MAX_REQUEUES="1") for _ in range(2)] == [0, 10]
    script.checkpoint(1000)
    assert [script.finish(10, MAX_REQUEUES="1") for _ in range(2)] == [0, 10]
    assert len(script.calls) == 2


@pytest.mark.parametrize(
    ("time_is_up", "code", "requeued"),
    [
        *(("", code, False) for code in (0, 1, 2, 137)),
        *(("yes", code, True) for code in (0, 10, 138)),
        *(("yes", code, False) for code in (1, 2)),
    ],
)
def test_near_the_time_limit_a_job_that_was_stopped_is_requeued_and_other_ends_are_ends(
    script: Script, time_is_up: str, code: int, requeued: bool
) -> None:
    assert script.finish(code, time_is_up) == (0 if requeued else code)
    assert script.calls == ["scontrol requeue 7"] * requeued
    assert not (script.run / "failures").exists()


def test_a_job_without_its_batch_script_is_ended_by_a_task(script: Script) -> None:
    assert script.finish(0, SLURM_STEP_ID="0") == 0
    assert script.calls == ["scancel 7"]


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ({}, 137),
        ({0: 0, 1: 0, 2: 0}, 0),
        ({0: 0, 2: 11}, 0),
        ({1: 143, 2: 10}, 10),
        ({0: 12, 1: 12}, 12),
        ({0: 1, 1: 1}, 137),
    ],
)
def test_the_runs_code_is_that_of_who_lived_to_its_end(script: Script, ends: dict[int, int], code: int) -> None:
    for node, end in ends.items():
        (script.run / "ends" / f"0-{node}").write_text(f"{end}\n")
    (script.run / "ends" / "1-0").write_text("0\n")  # of another try
    assert script.call("verdict 137").stdout == f"{code}\n"


@pytest.mark.parametrize(
    ("given", "flags"),
    [
        ({"SLURM_CPUS_PER_TASK": "64", "SLURM_JOB_CPUS_PER_NODE": "64(x2)"}, ["--cpus-per-task=64"]),
        ({"SLURM_JOB_CPUS_PER_NODE": "112(x3),96(x2),128"}, ["--cpus-per-task=96"]),  # --exclusive
        ({"SLURM_CPUS_PER_GPU": "8", "SLURM_JOB_CPUS_PER_NODE": "64(x2)"}, []),
        (
            {"SLURM_CPUS_PER_TASK": "64", "SRUN": "--cpus-per-task=32"},
            ["--cpus-per-task=64", "--cpus-per-task=32"],  # the last one counts
        ),
        # srun counts cores, of two threads each, where one of them is used
        ({"SLURM_HINT": "nomultithread", "SLURM_JOB_CPUS_PER_NODE": "256(x2),128"}, ["--cpus-per-task=64"]),
        ({"SLURM_THREADS_PER_CORE": "1", "SLURM_JOB_CPUS_PER_NODE": "256(x2)"}, ["--cpus-per-task=128"]),
        ({"SLURM_THREADS_PER_CORE": "2", "SLURM_JOB_CPUS_PER_NODE": "256(x2)"}, ["--cpus-per-task=256"]),
        (
            {"SLURM_HINT": "nomultithread", "SLURM_CPUS_PER_TASK": "64", "SLURM_JOB_CPUS_PER_NODE": "128(x2)"},
            ["--cpus-per-task=64"],  # it was cores that were asked for
        ),
        ({"SLURM_CPUS_PER_TASK": "64", "SRUN": "--hint=nomultithread -v"}, ["--cpus-per-task=32"]),
        ({"SLURM_JOB_CPUS_PER_NODE": "64", "SRUN": "--threads-per-core=1"}, ["--cpus-per-task=32"]),
        ({"SLURM_CPUS_PER_TASK": "1", "SRUN": "--hint=nomultithread"}, ["--cpus-per-task=1"]),
        ({"SLURM_HINT": "nomultithread", "SLURM_JOB_CPUS_PER_NODE": "8", "CPUS": ""}, ["--cpus-per-task=8"]),
    ],
)
def test_a_launcher_gets_the_cores_that_the_job_has_on_its_node(
    script: Script, given: dict[str, str], flags: list[str]
) -> None:
    (script.folder / "srun").write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$@" >{script.folder}/srun.words\necho 0 >{script.run}/ends/0-0\n'
    )
    (script.folder / "sinfo").write_text('#!/bin/sh\necho "${CPUS-256 2 64}"\necho "${CPUS-256 2 64}"\n')
    for command in ("srun", "sinfo"):
        (script.folder / command).chmod(0o755)
    assert script.call("main", SLURM_JOB_NODELIST="n[1-6]", **given).returncode == 0
    words = (script.folder / "srun.words").read_text().splitlines()
    assert [word for word in words[: words.index("bash")] if word.startswith("--cpus-per-task")] == flags


@pytest.mark.parametrize("name", sorted(WORKERS_FLAG))
@pytest.mark.parametrize(("try_", "asked"), [("$$", 1), ("$ended", 0)], ids=["that runs", "that has ended"])
def test_workers_are_asked_for_a_checkpoint_as_long_as_their_try_runs(
    script: Script, name: str, try_: str, asked: int
) -> None:
    """If the requests went on, the workers of the job's next try would get them."""
    (function,) = re.findall(r"^checkpoint\(\) \{$.*?^\}$", (SCRIPTS / name).read_text(), re.MULTILINE | re.DOTALL)
    once = f"sleep() {{ exit; }}\ntrue & ended=$!\nwait $ended\nworkers={try_}"
    script.call(f"{once}\n{function}\ncheckpoint {try_}")
    assert script.calls == ["scancel --signal=USR1 7"] * asked


SRUN = r"""#!/usr/bin/env bash
echo "$*" | head -n 1 >>"$RUN_DIR/sruns"
events="$RUN_DIR/events-0.jsonl"
case "$*" in
    */bin/recover-coordinator*)
        echo '{"event":"lead","term":1}' >"$events"
        while [[ ! -e $RUN_DIR/over ]]; do sleep 0.05; done
        sleep 1 # a host that is busy
        echo '{"event":"stop","code":0,"reason":"all workers have left"}' >>"$events"
        exec sleep 600 ;;
    *)
        while [[ ! -s $events ]]; do sleep 0.05; done
        touch "$RUN_DIR/over"
        exit 137 ;; # the highest code of all tasks, of which one was killed
esac
"""


def test_where_srun_starts_every_worker_a_coordinator_that_tells_the_end_late_is_waited_for(tmp_path: Path) -> None:
    script = tmp_path / "job"
    values = {"nodes": 1, "workers_flag": "--x", "workers": 2, "data": "--mock-data", "flags": "--y"}
    script.write_text(edited("recover-tasks.sbatch", venv=str(tmp_path), **values))
    (tmp_path / "bin").mkdir()
    python = "#!/bin/sh\necho host 1 0 host:2 host:2\n"
    for path, text in ((tmp_path / "srun", SRUN), (tmp_path / "bin" / "python", python)):
        path.write_text(text)
        path.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "RUN_DIR": str(tmp_path / "run"), "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": "2", "SLURM_JOB_NUM_NODES": "1", "SLURM_CPUS_PER_TASK": "4",
    }  # fmt: skip
    done = finished("bash", script, **environment)
    assert done.returncode == 0, done.stderr
    (workers,) = (words for words in (tmp_path / "run" / "sruns").read_text().splitlines() if "worker-0-" in words)
    assert " --cpus-per-task=4 " in workers, "a step does not inherit the cores of each task"
