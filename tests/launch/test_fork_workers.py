"""With --fork-workers one process of each node imports the program, and forks the workers; if it cannot, they start as
without the option."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys

import pytest

from recover_megatron.launch.command_line.arguments import parse
from tests.harness import REPOSITORY
from tests.harness.processes import alive
from tests.harness.waiting import eventually
from tests.launch.conftest import SECRET
from tests.launch.test_newcomers import AGREEING, HELD, LONGER, awaits, how_to_join, plans, said, training

SCRIPT = f"""
    import os, random, runpy, socket, subprocess, sys, threading, time
    import numpy.random
    from recover_megatron.megatron_hooks.entry.program import load
    from recover_megatron.network import fork_server, handover

    if fork_server.is_server():
        while "UNREADY" in os.environ and not os.path.exists("ready"):
            time.sleep(0.01)
        fault = os.environ.get("FAULT")
        if fault == "import":
            raise ImportError("no such module")
        if fault == "thread":
            threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        if fault == "connection":
            connection = socket.socket()
        if fault == "process":
            helper = subprocess.Popen(["sleep", "1000"])
        if fault == "exit":
            sys.exit()
        if fault == "fork":
            fork_server._fork = lambda: os.kill(10**9, 0)
        if fault == "second fork":
            forks, begin = [fork_server._fork, lambda: os.kill(10**9, 0)], fork_server._begin
            fork_server._fork = lambda: forks.pop(0)()
            fork_server._begin = lambda *arguments: (time.sleep(1), begin(*arguments))
        print("IMPORTED", os.getpid(), *({{"RANK", "LOCAL_RANK", "ROLE_RANK"}} & set(os.environ)), flush=True)
        fork_server.serve()
    if handover.is_prepared():
        handover.wait()
        assert "RECOVER_ROOM" not in os.environ and "RECOVER_PREPARED" not in os.environ
    print("DRAWS", random.random(), numpy.random.rand(), flush=True)
    print("OPEN", *sorted(set(os.listdir("/proc/self/fd"))), flush=True)
    runpy.run_path({str(AGREEING)!r}, run_name="__main__")
    """
"""agreeing.py, behind what ``load`` does in a fork server."""

slow = pytest.mark.slow


def forks(bench) -> list[object]:
    return ["--fork-workers", bench.script(SCRIPT), *LONGER[1:]]


def server(launch) -> int:
    """The pid of the fork server, which knows no worker's place, when it has imported the program."""
    launch.wait_for("[imports] IMPORTED")
    pid, place = re.search(r"\[imports\] IMPORTED (\d+)(.*)", launch.out).groups()
    assert place == "", "it would be taken for one worker's"
    return int(pid)


def parent(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


def shown(pid: int) -> dict[str, str]:
    """The environment of a process as others see it."""
    with open(f"/proc/{pid}/environ") as file:
        return dict(entry.split("=", 1) for entry in file.read().split("\0") if entry)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ([str(REPOSITORY / "pretrain_gpt_recover.py")], None),
        (["-m", "agreeing"], "only a Python script that imports load()"),
        ([str(AGREEING)], "only a Python script that imports load()"),
        (["--no-python", "python3", str(REPOSITORY / "pretrain_gpt_recover.py")], "only a Python script"),
    ],
    ids=["shipped", "module", "another", "behind a wrapper"],
)
def test_workers_are_forked_only_of_a_script_that_waits(options, reason):
    _, reasons = parse(["--fork-workers", *options, "--recover"])
    assert [reason in text for text in reasons] == [True] * (reason is not None)


def test_a_connection_that_the_launcher_was_started_with_is_no_obstacle():
    text = (
        "import socket; from recover_megatron.network.fork_server import obstacle; "
        "print(obstacle(-1)); connection = socket.socket(); print(obstacle(-1))"
    )
    with socket.socket() as inherited:
        command, pass_fds = [sys.executable, "-c", text], [inherited.fileno()]
        done = subprocess.run(command, pass_fds=pass_fds, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.stdout.split("\n")[:2] == [
        "",
        "the imported modules have opened a connection, which workers would share",
    ]


@slow
def test_workers_and_replacements_are_forked_and_are_processes_like_others(bench):
    own = {"RECOVER_WORKER_ID": "1"}  # the launcher was started by a worker of another launch
    launch = training(bench, 3, 2, *forks(bench), environment={**HELD, **awaits([4]), **own})
    pid = server(launch)
    for number in (signal.SIGUSR1, signal.SIGTERM):
        os.kill(pid, number)  # SLURM sends them to all processes of the step
    first = bench.workers(count=3)
    bench.kill(1, 3)
    launch.wait_for('"worker": 3, "epoch"')
    bench.kill(3, 4)
    launch.wait_for('"worker": 4, "epoch"')
    records = bench.workers(count=5)
    for record in (*first, records[4]):
        if record["worker_id"] != 1:
            assert parent(record["pid"]) == launch.pid
            assert os.getsid(record["pid"]) == record["pid"]
            environment, rank = shown(record["pid"]), str(record["rank"])
            assert environment["RECOVER_WORKER_ID"] == str(record["worker_id"])
            assert (environment["RANK"], environment["LOCAL_RANK"]) == (rank, rank)
    bench.go()
    launch.ends()
    assert launch.out.count("IMPORTED") == 1
    states = [(record["state"], record["signal"]) for record in bench.workers()]
    assert states == [("finished", None), ("killed", 9), ("finished", None), ("killed", 9), ("finished", None)]
    starts = said(bench, 4)[0]
    assert (starts["RANK"], starts["LOCAL_RANK"], starts["RECOVER_JOIN"]) == ("1", "1", "1")
    logs = [bench.log(worker) for worker in range(5)]
    draws = [number for log in logs for number in re.search(r"DRAWS (\S+) (\S+)", log).groups()]
    assert len(set(draws)) == len(draws), "each has random numbers of its own"
    assert {re.search("OPEN (.*)", log)[1] for log in logs} == {"0 1 2 3"}, "they inherit nothing else"
    assert "imports the program itself" not in launch.err
    assert not alive(pid)
    assert not launch.left()


@slow
@pytest.mark.parametrize(
    ("fault", "said_of_it"),
    [
        ("import", r"the fork server, process \d+, failed with exit code 1 after [\d.]+ s \(ImportError: no such mod"),
        ("exit", r"the fork server, process \d+, finished after"),
        ("thread", "the imported modules have started 1 threads?, which forked workers would lack"),
        ("connection", "the imported modules have opened a connection, which workers would share"),
        ("process", "the imported modules have started a process, which forked workers would share"),
        ("second fork", r"process \d+ could not fork worker 1 \(\[Errno 3\] No such process\)"),
        ("fork", r"process \d+ could not fork worker 0 \(\[Errno 3\] No such process\)"),
    ],
    ids=["import", "exit", "thread", "connection", "process", "second fork", "fork"],
)
def test_if_the_server_cannot_fork_workers_they_are_new_processes(bench, fault, said_of_it):
    launch = training(bench, 2, 1, *forks(bench), environment={**HELD, **awaits([2]), "FAULT": fault})
    assert re.search(f"{said_of_it}.*; from now on each worker is a new process", launch.err), launch.err
    assert launch.err.count("imports the program itself") == 1
    bench.kill(1, 2)
    launch.wait_for('"worker": 2, "epoch"')
    bench.go()
    launch.ends()
    assert [record["state"] for record in bench.workers()] == ["finished", "killed", "finished"]


@slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_server_that_is_lost_during_the_run_is_told_once_and_replacements_start_without_it(bench, number):
    launch = training(bench, 3, 2, *forks(bench), environment={**HELD, **awaits([4])})
    pid = server(launch)
    os.kill(pid, number)
    bench.kill(1, 3)
    launch.wait_for('"worker": 3, "epoch"')
    bench.kill(2, 4)
    launch.wait_for('"worker": 4, "epoch"')
    bench.go()
    launch.ends()
    how = "was killed by SIGKILL" if number == signal.SIGKILL else "could not fork worker 3 (timed out)"
    (line,) = [line for line in launch.err.splitlines() if "imports the program itself" in line]
    assert how in line or "could not fork worker 3" in line
    assert not alive(pid)
    assert [len(said(bench, worker)) > 0 for worker in (3, 4)] == [True, True]
    assert sum("DRAWS" in bench.log(worker) for worker in (3, 4)) == 2, "each has run once"


@slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_launch_that_ends_during_the_imports_leaves_nothing(bench, number):
    launch = bench.start("--nproc-per-node", 2, "--log-dir", "logs", *forks(bench), environment={"UNREADY": "yes"})
    eventually(lambda: any("script.py" in command(pid) for pid in set(launch.left()) - {launch.pid}), "it imports")
    launch.send(number)
    if number == signal.SIGTERM:
        launch.ends(128 + signal.SIGTERM)
        assert "imports the program itself" not in launch.err
    eventually(lambda: not launch.left(), "all processes have ended")


def children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return list(map(int, file.read().split()))


def command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            return file.read()
    except OSError:
        return ""


@slow
def test_forked_workers_do_not_outlive_their_launcher(bench):
    script = bench.script(SCRIPT[: SCRIPT.index("runpy.run_path")] + "print('UP', flush=True); time.sleep(1000)")
    launch = bench.up(2, "--fork-workers", script)
    pids = [record["pid"] for record in bench.workers(count=2)]
    launch.send(signal.SIGSTOP)  # it starts no reaper in place of this one
    reaper = next(pid for pid in children(launch.pid) if "workers.reaper" in command(pid))
    os.kill(reaper, signal.SIGKILL)
    launch.send(signal.SIGKILL)
    eventually(lambda: not any(map(alive, pids)) and not launch.left(), "all processes of the launch have ended")


@slow
def test_each_launcher_of_a_run_forks_its_own_also_one_that_has_joined(bench):
    script = forks(bench)
    environment = {**HELD, **SECRET}
    nodes = bench.nodes(2, "--max-restarts", 1, *script, "--recover-spares", 1, per_node=1, environment=environment)
    assert server(nodes[0]) != server(nodes[1])
    how = how_to_join(nodes[0]).split()
    options = ["--nproc-per-node", 1, "--max-restarts", 1, "--log-dir", "joined"]
    joined = bench.start(*how, *options, *script, "--recover-max-replicas", 4, environment=environment)
    server(joined)
    joined.wait_for('"event": "plan"')
    newcomer = bench.workers("joined")[0]
    os.kill(newcomer["pid"], signal.SIGKILL)
    joined.wait_for(f'"worker": {newcomer["worker_id"] + 1}, "epoch"')
    bench.go()
    assert [launch.wait() for launch in (*nodes, joined)] == [0, 0, 0], (nodes[0].err, nodes[1].err, joined.err)
    assert plans(bench, 0)[-1][-1] == newcomer["worker_id"] + 1
    assert all(launch.left() == [] for launch in (*nodes, joined))
    assert all(launch.out.count("IMPORTED") == 1 for launch in (*nodes, joined))
