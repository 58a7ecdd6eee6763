"""A SLURM cluster of several nodes on this machine: real daemons, in a folder and on ports of their own.

    munged     the key that all processes of the cluster share
    slurmctld  the controller
    slurmd -N  one a node; it starts a slurmstepd for the batch script and for each step of a job

All nodes are this host at 127.0.0.1; they differ by their ports, and by what runs on them.  Nothing of the system's own
SLURM is touched, if there is one: whoever talks to this cluster has ``SLURM_CONF`` in the environment.

``Job`` is the shipped script, edited as a user edits it: five lines, for a tiny GPT on CPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from recover_megatron.run_log.steps import StepRecord, read_steps
from tests.harness import REPOSITORY
from tests.harness.patience import patient
from tests.harness.processes import environment, free_ports
from tests.harness.waiting import eventually
from tests.megatron_hooks.tiny import MOCK, MODEL, NO_DROPOUT

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
PATIENCE = patient(240)
"""Seconds after which something that should have happened counts as stuck (a loaded machine, two cores)."""
MUNGE_USER = "munge"
NODE_MARK = "RECOVER_TEST_NODE"
"""In the environment of a daemon: which node it is."""

CONFIGURATION = """\
ClusterName=recover
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={credentials}
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
SlurmdTimeout={timeout}
SchedulerParameters=batch_sched_delay=1,sched_interval=5
KillWait={kill_wait}
ReturnToService=2
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=4 RealMemory=5000 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
POWER_SAVING = """\
SuspendProgram={program}
ResumeProgram={program}
SuspendTime=86400
SuspendTimeout=2
ResumeTimeout=3600
"""


@contextlib.contextmanager
def started(**shape: Any) -> Iterator[Cluster]:
    """A cluster of this shape that runs; a test is skipped where there can be none."""
    if reason := _why_not():
        warnings.warn(f"SKIPPED: nothing is tested on a real SLURM: {reason}", stacklevel=1)
        pytest.skip(reason)
    with contextlib.closing(Cluster(**shape)) as cluster:
        cluster.start()
        yield cluster


def _why_not() -> str:
    """Why no cluster can be started here; empty if one can."""
    missing = [program for program in PROGRAMS if not _program(program)]
    if missing:
        return f"SLURM is not installed here ({', '.join(missing)}): apt-get install slurm-wlm munge"
    if os.geteuid() != 0:
        return "a SLURM cluster of one's own is started by root here"
    return ""


class Cluster:
    """A running cluster of ``nodes`` nodes n1, n2, ...; ``close`` leaves nothing of it."""

    def __init__(self, nodes: int = 3, timeout: float = 20, power_saving: bool = False) -> None:
        """``timeout``: seconds after which the controller gives up a node that does not answer.

        ``power_saving``: it may power nodes down; its program notes their names in ``powered`` and does nothing else.
        """
        self.names = [f"n{number}" for number in range(1, nodes + 1)]
        # Not pytest's folder, which is root's alone: munge runs as its own user.
        self.folder = Path(tempfile.mkdtemp(prefix="recover-slurm-"))
        self.folder.chmod(0o755)
        ports = free_ports(nodes + 1)
        text = CONFIGURATION.format(
            host=socket.gethostname(),
            folder=self.folder,
            controller=ports[0],
            first=ports[1],
            last=ports[-1],
            nodes=nodes,
            timeout=round(patient(timeout)),
            credentials=round(patient(10)),
            kill_wait=round(patient(5)),
        )
        if power_saving:
            (program := self.folder / "power").write_text(f'#!/bin/sh\necho "$1" >>{self.folder}/powered\n')
            program.chmod(0o755)
            text += POWER_SAVING.format(program=program)
        (self.folder / "slurm.conf").write_text(text)
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))},
            "SLURM_CONF": str(self.folder / "slurm.conf"),
        }
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start all daemons, and wait until all nodes are idle."""
        self._start_munge()
        (self.folder / "state").mkdir()
        self._start("slurmctld", "slurmctld", "-D", "-i")
        for name in self.names:
            (self.folder / f"spool-{name}").mkdir()
            self.start_node(name)
        self.wait_idle()

    def wait_idle(self) -> None:
        """Until every node can be given a job."""
        wait_until(lambda: set(self.states().values()) == {"idle"}, "all nodes are idle")

    def start_node(self, name: str) -> None:
        """Start the daemon of a node, for the first time or after ``kill_node``."""
        self._start(name, "slurmd", "-D", "-N", name)

    def kill_node(self, *lost: str) -> None:
        """Kill the daemons of these nodes, their stepds and all that they have started, as a loss of power does.

        All are stopped first, beginning with those that could report the others' deaths: the last one of srun's two
        processes waits for nothing else. Children are killed before their parents. Else the kernel would continue a
        stopped process group whose last parent has ended (SIGHUP, SIGCONT), and srun would then abort the step.
        """
        doomed = [pid for name in lost for pid in self.processes_of(name)]
        assert {self._daemons[name].pid for name in lost} <= {*doomed}
        order = ("slurmstepd", "slurmd", "slurm_script", "bash", "srun")
        names = {pid: _name(pid) for pid in doomed}
        ranked = {pid: order.index(names[pid]) if names[pid] in order else len(order) for pid in doomed}
        stopped_in = sorted(doomed, key=lambda pid: (ranked[pid], -pid))
        # A child has a higher number than its parent.
        for number, pids in ((signal.SIGSTOP, stopped_in), (signal.SIGKILL, sorted(doomed, reverse=True))):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):  # it has ended with its parent
                    os.kill(pid, number)
        for name in lost:
            wait_until(lambda name=name: not any(map(_name, self.processes_of(name))), f"{name} is gone")
            self._daemons.pop(name).wait()

    def revive(self) -> None:
        """Start the nodes that were killed, and wait until every node is idle."""
        for name in self.names:
            if name not in self._daemons:
                self.start_node(name)
        self.wait_idle()

    def with_variable(self, entry: tuple[str, str]) -> list[int]:
        """Processes of jobs with this in their initial environment."""
        return [pid for pid in self.tasks() if entry in environment(pid).items()]

    def tasks(self) -> list[int]:
        """The processes that jobs have started and that still live."""
        return [pid for pid in psutil.pids() if self._belongs(pid) and "SLURM_JOB_ID" in environment(pid)]

    def processes_of(self, name: str) -> list[int]:
        """The daemon of a node, its stepds, and the processes of the tasks there."""
        return [pid for pid in psutil.pids() if self._node_of(pid) == name]

    def _node_of(self, pid: int) -> str | None:
        its = environment(pid)
        if its.get("SLURM_CONF") != str(self.folder / "slurm.conf"):
            return None
        return its.get("SLURMD_NODENAME", its.get(NODE_MARK))

    def states(self) -> dict[str, str]:
        """Of the nodes, by name."""
        said = self.run("sinfo", "--noheader", "--Node", "--format=%N %t")
        return dict(line.split() for line in said.splitlines())

    def run(self, *command: str, **variables: str) -> str:
        """A command of SLURM's; what it printed."""
        env = {**self.environment, **variables}
        done = subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=PATIENCE)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout

    def job(self, number: int) -> dict[str, str]:
        """What the controller knows of a job."""
        said = self.run("scontrol", "--oneliner", "show", "job", str(number))
        return dict(re.findall(r"(\S+?)=(\S*)", said))

    def wait_job(self, number: int, states: Sequence[str]) -> dict[str, str]:
        """Until the job is in one of these states."""
        wait_until(lambda: self.job(number)["JobState"] in states, f"job {number} is {' or '.join(states)}")
        return self.job(number)

    def close(self) -> None:
        """End everything, whatever state it is in."""
        for name in [*self._daemons]:
            self._daemons[name].kill()
            self._daemons.pop(name).wait()
        while left := [pid for pid in psutil.pids() if self._belongs(pid)]:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        shutil.rmtree(self.folder)

    def _belongs(self, pid: int) -> bool:
        return environment(pid).get("SLURM_CONF") == str(self.folder / "slurm.conf")

    def _start_munge(self) -> None:
        place = self.folder / "munge"
        place.mkdir()
        key = place / "key"
        key.write_bytes(os.urandom(64))
        key.chmod(0o600)
        for path in (place, key):
            shutil.chown(path, MUNGE_USER, MUNGE_USER)
        # The socket's folder must be munge's, or root's, and open to all who use it.
        options = ["--foreground", "--socket", f"{place}/socket", "--key-file", str(key), "--num-threads", "2"]
        options += ["--pid-file", f"{place}/pid", "--log-file", f"{place}/log", "--seed-file", f"{place}/seed"]
        place.chmod(0o755)
        self._start("munged", "runuser", "-u", MUNGE_USER, "--", _program("munged"), *options)
        (self.folder / "munge.socket").symlink_to(place / "socket")
        wait_until((place / "socket").exists, "munge listens")

    def _start(self, name: str, program: str, *arguments: str) -> None:
        with open(self.folder / f"{name}.out", "ab") as out:
            self._daemons[name] = subprocess.Popen(
                [_program(program), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**self.environment, NODE_MARK: name},
                start_new_session=True,
            )


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Patiently, and seldom: a look may be a command of SLURM's."""
    eventually(condition, what, PATIENCE, every=0.3)


def _program(name: str) -> str:
    return shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin") or ""


def _name(pid: int) -> str:
    """Of the program; empty if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).name()
    return ""


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


def training(iterations: int) -> str:
    """The flags that a job has for Megatron, as words."""
    return " ".join([*MODEL, *NO_DROPOUT, f"--train-iters {iterations} {SCHEDULE} {TIMES}"])


class Job:
    """One submission of a shipped script, and what it leaves behind."""

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        *options: str,
        name: str = "recover.sbatch",
        nodes: int | str = 3,
        workers: int = 1,
        iterations: int = 30,
        flags: str = "",
        recover: str = "",
    ) -> None:
        folder.mkdir()
        self.cluster, self.folder, self.run = cluster, folder, folder / "run"
        script = folder / name
        script.write_text(
            edited(
                name,
                nodes=nodes,
                workers_flag=WORKERS_FLAG[name],
                workers=workers,
                venv=Path(sys.executable).parents[1],
                data=" ".join(MOCK),
                flags=f"{training(iterations)} {flags}",
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
