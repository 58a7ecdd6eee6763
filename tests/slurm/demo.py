"""The shipped script, edited as a user edits it: five lines, for a tiny GPT on CPU."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from recover_megatron.run_log.steps import StepRecord, read_steps
from tests.harness import REPOSITORY
from tests.harness.patience import patient
from tests.megatron_hooks.tiny import MOCK, MODEL, NO_DROPOUT
from tests.slurm.cluster import Cluster, wait_until

SCRIPTS = REPOSITORY / "scripts" / "slurm"
COORDINATOR_TIMES = f"--heartbeat-interval 0.5 --heartbeat-timeout {patient(5):g}"
TIMES = f"--recover-heartbeat-interval 0.5 --recover-heartbeat-timeout {patient(5):g}"
SCHEDULE = "--global-batch-size 12 --lr-decay-iters 100 --lr-warmup-iters 2 --save-interval 1000000 --ckpt-format torch"
EDITS = {
    1: "#SBATCH --nodes={nodes}",
    2: "#SBATCH {workers_flag}={workers}",
    3: "VENV={venv}",
    4: "DATA='{data}'",
    5: "MEGATRON='{flags}'",
}
WORKERS_FLAG = {"recover.sbatch": "--cpus-per-task", "recover-tasks.sbatch": "--ntasks-per-node"}


def edited(name: str, **values: object) -> str:
    """The text of a script with its five lines edited, and no other."""
    lines = (SCRIPTS / name).read_text().splitlines()
    places = [index for index, line in enumerate(lines) if re.search(r"# EDIT \d", line)]
    assert len(places) == len(EDITS)
    for number, place in enumerate(places, start=1):
        assert f"# EDIT {number}" in lines[place]
        lines[place if lines[place].startswith("#SBATCH") else place + 1] = EDITS[number].format(**values)
    return "\n".join(lines) + "\n"


class Job:
    """One submission of a shipped script, and what it leaves behind."""

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        *options: str,
        name: str = "recover.sbatch",
        nodes: int = 3,
        workers: int = 1,
        iterations: int = 30,
        flags: str = "",
        recover: str = "",
    ) -> None:
        folder.mkdir()
        self.cluster, self.folder, self.run = cluster, folder, folder / "run"
        own = f"--train-iters {iterations} {SCHEDULE} {TIMES} {flags}"
        script = folder / name
        script.write_text(
            edited(
                name,
                nodes=nodes,
                workers_flag=WORKERS_FLAG[name],
                workers=workers,
                venv=Path(sys.executable).parents[1],
                data=" ".join(MOCK),
                flags=" ".join([*MODEL, *NO_DROPOUT, own]),
            )
        )
        said = cluster.run(
            "sbatch", "--parsable", f"--chdir={folder}", *options, str(script),
            RUN_DIR=str(self.run), MAX_RESTARTS="0", RECOVER=recover, COORDINATOR=COORDINATOR_TIMES,
            PYTHONPATH=str(REPOSITORY), OMP_NUM_THREADS="1",
        )  # fmt: skip
        self.number = int(said)

    def steps(self) -> list[StepRecord]:
        path = self.run / "steps.jsonl"
        return list(read_steps(path)) if path.exists() else []

    def pid_of(self, worker: int) -> int:
        """Of a running worker."""
        return next(w["pid"] for w in json.loads((self.run / "workers.json").read_text()) if w["worker_id"] == worker)

    def events(self, node: int | None = None) -> str:
        """The training's events, or those of a node's coordinator."""
        return (self.run / ("events.jsonl" if node is None else f"events-{node}.jsonl")).read_text()

    def launchers(self, attempt: int) -> list[str]:
        """What the nodes said in this try."""
        return [log.read_text(errors="replace") for log in sorted(self.run.glob(f"launcher-{attempt}-*.log"))]

    def wait_iteration(self, iteration: int) -> None:
        """Until it is committed; at once an error when the job ends before."""

        def reached() -> bool:
            state = self.cluster.job(self.number)["JobState"]
            assert state in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"), f"{state}: {self.said()}"
            return any(step.iteration >= iteration for step in self.steps())

        wait_until(reached, f"iteration {iteration} of job {self.number}")

    def wait(self, *states: str) -> None:
        """Until the job has ended, in one of these states."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        job = self.cluster.wait_job(self.number, ended)
        assert job["JobState"] in states, f"{job['JobState']} {job['ExitCode']}: {self.said()}"

    def said(self) -> str:
        """All that the script and the launchers said."""
        logs = sorted([*self.folder.glob("*.out"), *self.run.glob("launcher-*.log"), *self.run.glob("coord*.log")])
        return "\n".join(f"== {log.name}\n{log.read_text(errors='replace')}" for log in logs)
