"""A process is started before a replacement is needed, and becomes it; what else happens to it is no worker's death."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from recover_megatron.launch.command_line.arguments import parse
from recover_megatron.launch.workers import successors
from recover_megatron.launch.workers.states import WorkerState
from recover_megatron.launch.workers.successors import Successors
from recover_megatron.membership.io.session import connect
from recover_megatron.network import handover, system
from recover_megatron.network.handover import LARGEST, Handover
from recover_megatron.variables import PREPARED_VARIABLE
from tests.harness.processes import alive, python
from tests.harness.waiting import DEADLINE, eventually
from tests.launch.conftest import SECRET, spec_of
from tests.launch.test_log_disk import disk as disk
from tests.launch.test_log_disk import fill
from tests.launch.test_newcomers import AGREEING, HELD, LONGER, awaits, ended, how_to_join, plans, said, training

SCRIPT = f"""
    import os, runpy, sys, time
    from recover_megatron.megatron_hooks.entry.program import load
    from recover_megatron.network import handover

    if handover.is_prepared():
        print("it waits", file=sys.stderr, flush=True)
        print("PREPARED", os.getpid(), *({{"RANK", "LOCAL_RANK", "ROLE_RANK"}} & set(os.environ)), flush=True)
        while "UNREADY" in os.environ and not os.path.exists("ready"):
            time.sleep(0.01)
        if "FAILS" in os.environ:
            raise ImportError("no such module")
        handover.wait()
    runpy.run_path({str(AGREEING)!r}, run_name="__main__")
    """
"""agreeing.py, behind what ``load`` does in a prepared process."""


# -- the environment --------------------------------------------------------------------------------------------------


def given(before: dict[str, str], after: dict[str, str]) -> dict[str, str]:
    """The environment of a prepared process that was started with ``before``, after it is given ``after``."""
    pipe = Handover(before)
    environ = dict(pipe.environment)
    assert pipe.give(after)
    handover.wait(environ)
    return environ


def test_a_prepared_process_gets_the_environment_of_the_worker_but_for_what_its_modules_have_set():
    before = {"HOME": "/root", "MASTER_ADDR": "a", "RECOVER_COORDINATOR": "a:1"}
    after = {"HOME": "/root", "RECOVER_COORDINATOR": "a:1,b:2", "RANK": "3", "ODD": "\udcff=\n\u00e9"}
    assert given(before, after) == after
    system.use_all_descriptors()
    pipe = Handover(before)
    high = fcntl.fcntl(pipe.descriptor, fcntl.F_DUPFD, 1500)  # as of a launcher of many workers
    changed = {"NVTE_SET": "by an import", "HOME": "changed by an import"}
    environ = {**pipe.environment, PREPARED_VARIABLE: str(high), **changed}
    os.close(pipe.descriptor)
    assert pipe.give(after)
    handover.wait(environ)
    assert environ == {**after, **changed}


def test_what_is_too_long_or_comes_too_late_is_not_given():
    pipe = Handover({})
    assert not pipe.give({"LONG": "x" * LARGEST})
    os.close(pipe.descriptor)
    pipe = Handover({})
    os.close(pipe.descriptor)  # the process has ended
    assert not pipe.give({"RANK": "0"})


@pytest.mark.parametrize(("sent", "code"), [(b"", 0), (b'{"RANK": "0"}', 7), (b'{"RANK"', 1), (b'["RANK"]', 1)])
def test_a_prepared_process_that_is_given_nothing_ends_in_silence(sent: bytes, code: int) -> None:
    text = (
        "import os, sys; from recover_megatron.network import handover; read, write = os.pipe(); "
        f"os.environ[{PREPARED_VARIABLE!r}] = str(read); os.write(write, {sent!r}); os.close(write); "
        "handover.wait(); sys.exit(7 if os.environ['RANK'] == '0' else 8)"
    )
    done = python("-c", text)
    assert done.returncode == code
    assert (done.stderr == "") == (code != 1)


def test_a_signal_of_the_launcher_after_the_environment_reaches_the_worker() -> None:
    pipe = Handover({})
    text = (
        "import signal; from recover_megatron.network import handover; "
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]); print('blocked', flush=True); handover.wait()"
    )
    command, environment = [sys.executable, "-c", text], {**os.environ, **pipe.environment}
    process = subprocess.Popen(command, env=environment, pass_fds=[pipe.descriptor], stdout=subprocess.PIPE)
    os.close(pipe.descriptor)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    assert pipe.give({})
    process.communicate(timeout=DEADLINE)
    assert process.returncode == -signal.SIGTERM


def test_a_process_that_is_no_worker_yet_does_not_join(monkeypatch):
    monkeypatch.setenv(PREPARED_VARIABLE, "3")
    with pytest.raises(RuntimeError, match="started in advance, and is no worker yet"):
        connect(environ={})


# -- when -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "options", "prepares"),
    [
        (SCRIPT, ["--max-restarts", "1"], True),
        (SCRIPT, [], False),
        (SCRIPT, ["--max-restarts", "1", "--prepared-workers", "0"], False),
        (SCRIPT.replace("entry.program", "entry"), ["--max-restarts", "1"], False),
        (
            "def main():\n    from recover_megatron.megatron_hooks.entry.program import load",
            ["--max-restarts", "1"],
            False,
        ),
        (SCRIPT, ["--max-restarts", "1", "--no-python", sys.executable], False),
    ],
    ids=[
        "prepares",
        "no restarts",
        "not wanted",
        "another script",
        "a script that may do something else",
        "behind a wrapper",
    ],
)
def test_only_a_script_that_waits_is_started_before_it_is_needed(bench, text, options, prepares):
    spec, reasons = parse([*options, str(bench.folder / bench.script(text)), "--recover"])
    assert not reasons
    assert spec.prepares == prepares


def test_none_is_prepared_while_a_worker_starts_or_when_none_may_be_replaced(monkeypatch):
    asked: list[object] = []
    monkeypatch.setattr(
        successors,
        "Prepared",
        lambda *_: SimpleNamespace(
            begin=lambda worker: asked.append(worker.worker_id), end=lambda: asked.append("end"), take=None
        ),
    )
    plan = spec_of(max_restarts=2, spares=1)
    monkeypatch.setattr(type(plan), "prepares", True)
    workers = successors.launched(plan)
    table = SimpleNamespace(first_id=0, live=workers, last_words={}, add=workers.extend)
    starting = Successors(plan, None, table, print, print, print, dict)
    starting.prepare({0, 1, 2})
    assert asked == [], "worker 3 still starts"
    starting.prepare({0, 1, 2, 3})
    assert asked == [5], "the spare, worker 4, may wait for ever"
    replacement = starting.of(ended(workers.pop(1), -9))
    starting.prepare({0, 1, 2, 3})
    assert asked == [5], "its replacement has no place yet"
    starting.prepare({0, 1, 2, 3, 5})
    assert asked == [5, 6]
    starting.stop()
    starting.prepare({0, 1, 2, 3, 5})
    assert asked == [5, 6, "end"], "the node is drained"
    starting.stop(False)
    replacement.state = WorkerState.RUNNING
    workers.remove(replacement)
    starting.of(ended(replacement, -9))
    starting.prepare({0, 1, 2, 3, 5, 6})
    assert asked == [5, 6, "end"], "--max-restarts is used up"


# -- real processes ---------------------------------------------------------------------------------------------------

slow = pytest.mark.slow


def prepares(bench) -> list[object]:
    return [bench.script(SCRIPT), *LONGER[1:]]


def prepared(launch, worker: int) -> int:
    """The pid of the process that is prepared for this worker's id, when it is there."""
    launch.wait_for(f"[{worker}] PREPARED")
    pid, place = re.search(rf"\[{worker}\] PREPARED (\d+)(.*)", launch.out).groups()
    assert place == "", "it would be taken for another worker's"
    return int(pid)


@slow
def test_a_prepared_process_takes_each_place_and_comes_again_when_it_is_taken(bench):
    """Signals that SLURM sends to all processes of the step have not ended it, and do not end the worker."""
    launch = training(bench, 3, 2, *prepares(bench), environment={**HELD, **awaits([4])})
    first = prepared(launch, 3)
    for number in (signal.SIGUSR1, signal.SIGTERM):
        os.kill(first, number)
    bench.kill(1, 3)
    second = prepared(launch, 4)
    bench.kill(3, 4)
    launch.wait_for('"worker": 4, "epoch"')
    bench.go()
    launch.ends()
    records = bench.workers()
    assert [(record["pid"], record["replaces"]) for record in records[3:]] == [(first, 1), (second, 3)]
    assert [(record["state"], record["signal"]) for record in records[3:]] == [("killed", 9), ("finished", None)]
    starts = said(bench, 3)[0]
    assert (starts["RANK"], starts["LOCAL_RANK"], starts["RECOVER_JOIN"]) == ("1", "1", "1")
    assert "RECOVER_SPARE" not in starts
    assert "[5]" not in launch.out, "no more may be replaced"
    assert "prepared to be" not in launch.err


@slow
def test_a_process_that_still_imports_is_taken_and_a_second_death_meanwhile_starts_a_new_one(bench):
    launch = training(bench, 3, 3, *prepares(bench), environment={**HELD, **awaits([3, 4]), "UNREADY": "yes"})
    first = prepared(launch, 3)
    bench.kill(1, 3)
    bench.kill(2, 3)
    launch.wait_for('"worker": 4, "epoch"')
    assert "[5]" not in launch.out, "worker 3 has no place yet"
    bench.go("ready")
    launch.wait_for('"worker": 3, "epoch"')
    prepared(launch, 5)
    bench.go()
    launch.ends()  # though a prepared process waits
    records = bench.workers()
    assert len(records) == 5
    assert records[3]["pid"] == first
    assert [record["state"] for record in records[3:]] == ["finished", "finished"]
    assert "prepared to be" not in launch.err


@slow
@pytest.mark.parametrize("fails", [False, True], ids=["killed", "fails"])
def test_a_prepared_process_that_ends_is_told_once_and_the_next_replacement_is_a_new_one(bench, fails):
    environment = {**HELD, **awaits([3]), **({"FAILS": "yes"} if fails else {})}
    launch = training(bench, 3, 2, *prepares(bench), environment=environment)
    pid = prepared(launch, 3)
    if not fails:
        os.kill(pid, signal.SIGKILL)
    launch.wait_for("prepared to be worker 3")
    bench.kill(1, 3)
    launch.wait_for('"worker": 3, "epoch"')
    prepared(launch, 4)
    bench.go()
    launch.ends()
    (line,) = [line for line in launch.err.splitlines() if "prepared to be worker 3" in line]
    how = r"was killed by SIGKILL \(signal 9\) after [\d.]+ s"
    if fails:
        how = r"failed with exit code 1 after [\d.]+ s \(ImportError: no such module\)"
    assert re.search(rf"process {pid} on \S+, prepared to be worker 3, {how}; the run goes on, and the next", line)
    records = bench.workers()
    assert [(record["worker_id"], record["state"]) for record in records[3:]] == [(3, "finished")]
    assert records[3]["pid"] != pid
    assert not (bench.folder / "logs" / "worker-3.log.old").exists(), "one log has the lines of both processes"


@slow
def test_replacements_that_fail_silently_are_taken_for_alike_though_one_was_prepared(bench):
    fails = "if int(os.environ['RECOVER_WORKER_ID']) > 2: os._exit(3)\n    runpy.run_path"
    script = bench.script(SCRIPT.replace("runpy.run_path", fails))
    launch = training(bench, 3, 4, script, *LONGER[1:], environment=HELD)
    prepared(launch, 3)
    bench.kill(1, 3)
    launch.wait_for("2 replacement workers have ended in the same way")
    bench.go()
    launch.ends()


@slow
def test_signals_that_end_the_launch_end_the_prepared_process_in_silence(bench):
    launch = training(bench, 2, 1, *prepares(bench))
    prepared(launch, 2)
    launch.send(signal.SIGSTOP)  # the signal of SLURM, to all processes, ends the workers before their launcher
    for pid in set(launch.left()) - {launch.pid}:
        os.kill(pid, signal.SIGTERM)
    eventually(lambda: not any(alive(worker["pid"]) for worker in bench.workers()), "the workers have ended")
    launch.send(signal.SIGTERM)
    launch.send(signal.SIGCONT)
    launch.ends(128 + signal.SIGTERM)
    assert "prepared to be" not in launch.err


@slow
def test_a_prepared_process_does_not_outlive_its_launcher(bench):
    launch = training(bench, 2, 1, *prepares(bench))
    pid = prepared(launch, 2)
    launch.send(signal.SIGKILL)
    eventually(lambda: not alive(pid) and not launch.left(), "all processes of the launch have ended")


@slow
def test_each_launcher_of_a_run_has_its_own_also_one_that_has_joined(bench):
    script = [*prepares(bench)]
    nodes = bench.nodes(2, "--max-restarts", 1, *script, per_node=1, environment={**HELD, **SECRET})
    assert prepared(nodes[0], 2) != (of_node := prepared(nodes[1], 3))
    how = how_to_join(nodes[0]).split()
    options = ["--nproc-per-node", 1, "--max-restarts", 1, "--log-dir", "joined"]
    joined = bench.start(*how, *options, *script, "--recover-max-replicas", 3, environment={**HELD, **SECRET})
    joined.wait_for("PREPARED")
    newcomer = bench.workers("joined")[0]
    of_joined = prepared(joined, newcomer["worker_id"] + 1)
    os.kill(newcomer["pid"], signal.SIGKILL)
    bench.kill(1, 2)
    joined.wait_for(f'"worker": {newcomer["worker_id"] + 1}, "epoch"')
    nodes[1].wait_for('"worker": 3, "epoch"')
    bench.go()
    assert [launch.wait() for launch in (*nodes, joined)] == [0, 0, 0], (nodes[0].err, nodes[1].err, joined.err)
    assert bench.workers("joined")[1]["pid"] == of_joined
    found = {record["worker_id"]: record["pid"] for record in bench.workers()}
    assert found[3] == of_node
    assert plans(bench, 0)[-1] == [0, 3, newcomer["worker_id"] + 1]
    assert all(launch.left() == [] for launch in (*nodes, joined))


@slow
def test_what_is_prepared_for_a_worker_that_is_not_started_is_ended(bench):
    """A device fails its test: the id is used up, and the process for it of no use."""
    fails = f"{sys.executable} -c 'raise SystemExit(1)'"
    launch = training(bench, 3, 2, "--device-test", fails, *prepares(bench))
    pid = prepared(launch, 3)
    bench.kill(1, 3)
    launch.wait_for("worker 3 is not started")
    eventually(lambda: not alive(pid), "the process has ended")
    bench.go()
    launch.ends()
    assert "prepared to be" not in launch.err


@slow
def test_a_full_disk_keeps_no_prepared_process_from_its_place(bench, disk):
    launch = training(bench, 3, 1, *prepares(bench), environment={**HELD, **awaits([3])})
    pid = prepared(launch, 3)
    room = fill(disk)
    bench.kill(1, 3)
    launch.wait_for('"worker": 3, "epoch"')
    room()
    bench.go()
    launch.ends()
    assert bench.workers()[3]["pid"] == pid
