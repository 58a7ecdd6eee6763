"""A worker dies, or the launcher is told to stop: who ends, who goes on, what is said and recorded.

No process outlives the launcher, however it ends.
"""

import contextlib
import multiprocessing.process
import os
import re
import signal
import tempfile
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from recover_megatron.network.system import keep_sockets, remove_sockets
from tests.harness.processes import alive, children, command_line, processes_with
from tests.harness.waiting import eventually

from .conftest import IN_THE_RUN, UNTIL_TOLD

# Each worker starts: a child that ignores SIGTERM, a grandchild in a session of its own whose parent is gone, a program
# in a session of its own.  Every process but the program ignores what can be ignored.
FAMILY = """
    import os, signal, subprocess, time

    def main():
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        if os.fork() == 0:
            time.sleep(1000)
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(1000)
            os._exit(0)
        os.wait()
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
        print("UP", os.environ["RANK"])
        while not os.path.exists("go" + os.environ["RANK"]):
            time.sleep(0.05)

    if __name__ == "__main__":
        main()
    """


def test_one_workers_death_does_not_end_the_others(bench):
    launch = bench.up(3, bench.script(UNTIL_TOLD))
    victim = bench.workers(count=3)[1]
    os.kill(victim["pid"], signal.SIGKILL)
    launch.wait_for("was killed by SIGKILL")
    bench.go()
    assert launch.wait() == 137
    assert "DONE 0" in launch.out
    assert "DONE 2" in launch.out
    assert "DONE 1" not in launch.out
    said = next(line for line in launch.err.splitlines() if "was killed by" in line)
    assert f"worker 1 on {victim['host']} (pid {victim['pid']}) was killed by SIGKILL (signal 9)" in said
    assert "the other 2 workers here continue" in said
    assert str(bench.folder / "logs" / "worker-1.log") in said


def test_a_worker_killed_by_a_signal_that_has_no_name_is_told_like_any_other(bench):
    launch = bench.run("--log-dir", "logs", bench.script("import os; os.kill(os.getpid(), 40)"), ends=128 + 40)
    assert "was killed by signal 40" in launch.err
    assert bench.workers()[0]["signal"] == 40
    assert "Traceback" not in launch.err


def test_survivors_that_finish_a_fault_tolerant_run_make_it_a_success(bench):
    launch = bench.up(2, bench.script(IN_THE_RUN), "--recover", says="JOINED")
    eventually(lambda: bench.events("witness"), "the launcher has come")
    bench.kill(0, 2, signal.SIGSEGV)
    launch.wait_for("SIGSEGV")
    bench.go()
    assert launch.wait() == 0


@pytest.mark.parametrize("end", ["killed", "exited"])
def test_what_a_dead_worker_leaves_behind_is_killed_while_the_others_go_on(bench, end):
    launch = bench.up(2, bench.script(FAMILY))
    dead, survivor = bench.workers(count=2)

    def family(worker_id):
        return set(processes_with(f"RECOVER_WORKER_ID={worker_id}")) & set(launch.left())

    # A process in the middle of exec shows no environment for a moment.
    eventually(lambda: len(family(0)) == len(family(1)) == 4, "each worker and its three children run")
    mine, others = family(0), family(1)
    if end == "killed":
        os.kill(dead["pid"], signal.SIGKILL)
    else:
        bench.go("go0")
    launch.wait_for("that it left behind")
    eventually(lambda: not any(map(alive, mine)), "nothing is left of worker 0")
    assert all(map(alive, others))
    assert alive(survivor["pid"])
    bench.go("go1")
    launch.ends(137 if end == "killed" else 0)


def test_the_launcher_does_not_wait_for_pipes_that_a_dead_workers_child_holds(bench):
    """Even a child that cleared its environment, left the session and lost its parent delays nothing, and is found."""
    script = bench.script(
        """
        import os, subprocess, time
        subprocess.Popen(["env", "-i", "setsid", "sh", "-c", "echo $$ > writing; mv writing hidden; exec sleep 1000"])
        print("LAST WORDS")
        while not os.path.exists("hidden"):
            time.sleep(0.05)
        """
    )
    launch = bench.run(script)
    assert "LAST WORDS" in launch.out
    hidden = int((bench.folder / "hidden").read_text())
    assert not alive(hidden)


@pytest.mark.parametrize("killed", ["worker", "launch"])
def test_what_a_killed_worker_has_left_in_shared_memory_is_removed_and_no_other(bench, killed):
    """By a process of Python's that outlives the worker; one that does not end by itself is killed, too."""
    script = bench.script(
        """
        import multiprocessing, os, time
        lock = multiprocessing.get_context("spawn").Lock()
        print("UP", "sem." + lock._semlock.name[1:])
        while not os.path.exists("go"):
            time.sleep(0.05)
        """
    )
    launch = bench.up(2, script)
    names = [Path("/dev/shm", name) for name in re.findall(r"UP (sem[.]\S+)", launch.out)]
    assert [name.exists() for name in names] == [True, True]
    if killed == "launch":
        launch.send(signal.SIGKILL)
        leaves_nothing(launch)
    else:
        bench.kill(0, 2)
        launch.wait_for("was killed by SIGKILL")
        eventually(lambda: sum(name.exists() for name in names) == 1, "what worker 0 has left is removed")
        bench.go()
        launch.ends(137)
    assert not any(name.exists() for name in names)


@pytest.mark.parametrize("killed", ["worker", "launch"])
def test_the_sockets_that_a_killed_worker_has_left_are_removed_and_no_others(bench, killed):
    """Those of its helpers, too: a manager's, and that of a loader that hands a descriptor on."""
    script = bench.script(
        """
        import multiprocessing, os, time
        from multiprocessing.connection import Listener
        from recover_megatron.membership.io.session import connect

        def listen(method):
            listener = Listener()
            print(f"UP by {method}", flush=True)
            time.sleep(1000)

        if __name__ == "__main__":
            session = connect()
            for method in ("spawn", "fork"):
                multiprocessing.get_context(method).Process(target=listen, args=(method,), daemon=True).start()
            while not os.path.exists("go"):
                time.sleep(0.05)
            os._exit(0)
        """
    )
    with tempfile.TemporaryDirectory() as name:  # a short one: a socket's path takes 107 bytes
        _leaves_no_sockets(bench, script, Path(name), killed)


def _leaves_no_sockets(bench, script, folder, killed):
    (others := folder / "pymp-of-another" / "listener").mkdir(parents=True)
    launch = bench.up(2, script, says="UP by", environment={"TMPDIR": str(folder)})
    launch.wait_for("UP by", times=4)
    own = [path for path in folder.glob("pymp-*") if path != others.parent]
    assert [len(os.listdir(path)) for path in own] == [2, 2], (
        f"{own}: sockets of its helpers, in a folder of each worker"
    )
    if killed == "launch":
        launch.send(signal.SIGKILL)
        leaves_nothing(launch)
    else:
        bench.kill(0, 2)
        eventually(lambda: sum(path.exists() for path in own) == 1, "what worker 0 has left is removed")
        bench.go()
        launch.wait()
    eventually(lambda: not any(path.exists() for path in own), "those of the other worker are removed")
    assert others.exists()


def test_where_a_path_of_ours_is_too_long_for_a_socket_python_chooses_its_own(tmp_path, monkeypatch):
    config = {}
    monkeypatch.setattr(multiprocessing.process, "current_process", lambda: SimpleNamespace(_config=config))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 60)))
    keep_sockets({"RECOVER_LAUNCH_ID": "launch"})
    assert config == {}
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    keep_sockets({"RECOVER_LAUNCH_ID": f"launch-{os.getpid()}"})
    assert os.listdir(config["tempdir"]) == []
    remove_sockets(f"launch-{os.getpid()}")
    assert not os.path.exists(config["tempdir"])


@pytest.mark.parametrize(
    ("number", "code"),
    [(number, 128 + number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)] + [(signal.SIGUSR1, 0)],
)
def test_a_signal_lets_workers_end_by_themselves(bench, number, code):
    """SIGUSR1 is passed on, and ends nobody who does not want it."""
    script = bench.script(
        """
        import os, signal, sys, time
        def leave(*_):
            print("SAVED", os.environ["RANK"])
            sys.exit(0)
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, leave)
        print("UP")
        time.sleep(1000)
        """
    )
    launch = bench.up(2, script)
    launch.send(number)
    launch.ends(code)
    assert launch.out.count("SAVED") == 2
    assert "Traceback" not in launch.err


def test_a_launch_that_was_started_with_a_terminals_signals_ignored_goes_on(bench):
    """So are the background jobs of a script (SIGINT), and what nohup starts (SIGHUP)."""
    tells = "import signal\nsignal.signal(signal.SIGUSR1, lambda *_: print('TOLD', flush=True))\n"
    script = bench.script(tells + textwrap.dedent(UNTIL_TOLD))
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGHUP, signal.SIGINT)}
    try:
        launch = bench.up(1, script)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for number in (*before, signal.SIGUSR1):
        launch.send(number)
    launch.wait_for("TOLD")  # so it has had the others
    bench.go()
    launch.ends(0)


def test_after_the_grace_time_workers_are_killed_and_nothing_is_left(bench):
    launch = bench.up(2, "--grace-seconds", 0.5, bench.script(FAMILY))
    reaper, told = reaper_of(launch), time.monotonic()
    launch.send(signal.SIGTERM)
    launch.ends(128 + signal.SIGTERM)
    assert time.monotonic() - told >= 0.5
    assert [worker["signal"] for worker in bench.workers()] == [signal.SIGKILL, signal.SIGKILL]
    assert "Traceback" not in launch.err
    assert not alive(reaper)


def test_a_second_signal_kills_at_once(bench):
    launch = bench.up(1, "--grace-seconds", 10_000, bench.script(FAMILY))
    launch.send(signal.SIGINT)
    launch.wait_for("SIGTERM to 1 worker")
    launch.send(signal.SIGINT)
    launch.ends(128 + signal.SIGINT)


def test_workers_json_follows_the_workers(bench):
    script = bench.script(
        """
        import os, sys, time
        print("UP")
        rank = os.environ["RANK"]
        if rank == "1":
            sys.exit(3)
        while not os.path.exists("go"):
            time.sleep(0.05)
        """
    )
    launch = bench.up(3, script)
    launch.wait_for("failed with exit code 3")
    eventually(lambda: bench.workers(count=3)[1]["state"] == "failed", "the failure is recorded")
    running = bench.workers()
    assert [worker["worker_id"] for worker in running] == [0, 1, 2]
    assert [worker["state"] for worker in running] == ["running", "failed", "running"]
    os.kill(running[2]["pid"], signal.SIGTERM)
    launch.wait_for("SIGTERM")
    bench.go()
    assert launch.wait() == 3
    ended = bench.workers()
    assert [worker["state"] for worker in ended] == ["finished", "failed", "killed"]
    assert [worker["exit_code"] for worker in ended] == [0, 3, None]
    assert [worker["signal"] for worker in ended] == [None, None, signal.SIGTERM]
    for worker in ended:
        assert worker["started"] <= worker["ended"]
        assert worker["node_rank"] == 0
        assert worker["local_rank"] == worker["worker_id"]
        assert Path(worker["log"]).is_file()


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["0<&-", ">&-", "2>&-", "0<&- >&- 2>&-"])
def test_closed_standard_streams_do_no_harm(bench, closed):
    script = bench.script("open('ran', 'w').write('yes'); print('shown')")
    assert bench.shell(f"exec $RUN --log-dir logs {script} {closed}") == 0
    assert bench.log() == "shown\n"


def test_children_from_before_the_launch_are_left_alone(bench):
    """A shell that started something and then became recover-run by exec."""
    code = bench.shell(f"sleep 1000 & echo $! > bystander; exec $RUN {bench.script("print('RAN')")}")
    bystander = int((bench.folder / "bystander").read_text())
    try:
        assert code == 0
        assert alive(bystander)
    finally:
        os.kill(bystander, signal.SIGKILL)


def test_a_log_that_cannot_be_opened_costs_the_log_alone(bench):
    for name in ("worker-1.log", "worker-1.log.old"):  # neither can the log be opened nor the old one be put aside
        (bench.folder / "logs" / name / "inside").mkdir(parents=True)
    launch = bench.run("--nproc-per-node", 2, "--log-dir", "logs", bench.script("print('RAN')"))
    assert launch.out.count("RAN") == 2
    assert "worker-1.log cannot be written" in launch.err
    assert "Traceback" not in launch.err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_to_every_process_of_a_launch_ends_no_helper_that_the_workers_need(bench, number):
    """So SLURM sends them: to all that it finds in a step, coordinators included."""
    script = bench.script(
        f"""
        import signal, time
        from recover_megatron.membership.io.session import connect

        def main():
            asked = []
            signal.signal({int(number)}, lambda *_: asked.append(1))
            session = connect()
            session.join({{}})
            print("JOINED", flush=True)
            while not asked:
                time.sleep(0.05)
            session.agree(1)
            session.leave()
            print("LEFT", flush=True)

        if __name__ == "__main__":
            main()
        """
    )
    launch = bench.up(2, script, says="JOINED")
    for pid in launch.left():
        with contextlib.suppress(ProcessLookupError):  # those that were told before may end it
            os.kill(pid, number)
    assert launch.wait() == (0 if number == signal.SIGUSR1 else 128 + number), launch.err
    assert launch.out.count("LEFT") == 2, launch.out + launch.err


def reaper_of(launch):
    name = "recover_megatron.launch.workers.reaper"
    reapers = [pid for pid in children(launch.pid) if any(name in word for word in command_line(pid))]
    assert len(reapers) == 1
    return reapers[0]


def start_family(bench, logs="logs", environment=None):
    launch = bench.up(2, bench.script(FAMILY), logs=logs, environment=environment)
    # The launcher, two candidate coordinators, per worker four.
    eventually(lambda: len(launch.left()) == 11, "11 processes run")
    return launch


def leaves_nothing(launch):
    """It has been killed."""
    assert launch.wait() == -signal.SIGKILL
    eventually(lambda: launch.left() == [], "every process of the launch has ended")


def test_sigkill_of_the_launcher_leaves_nothing(bench):
    launch = start_family(bench)
    reaper = reaper_of(launch)
    launch.send(signal.SIGKILL)
    leaves_nothing(launch)
    eventually(lambda: not alive(reaper), "the reaper has ended")
    assert [worker["worker_id"] for worker in bench.workers()] == [0, 1], "workers.json is whole"


@pytest.mark.slow
def test_sigkill_of_the_launchers_whole_group_leaves_nothing(bench):
    launch = start_family(bench)
    os.killpg(launch.pid, signal.SIGKILL)
    leaves_nothing(launch)


def test_sigkill_of_the_launcher_in_the_middle_of_the_start_leaves_nothing(bench):
    launch = bench.start("--nproc-per-node", 8, bench.script(FAMILY))
    launch.wait_for("starting 8 workers")
    launch.send(signal.SIGKILL)
    leaves_nothing(launch)


@pytest.mark.slow
def test_a_killed_warden_is_replaced_and_the_new_one_does_its_work(bench):
    launch = start_family(bench)
    first = reaper_of(launch)
    os.kill(first, signal.SIGKILL)
    launch.wait_for("took its place")
    second = reaper_of(launch)
    assert second != first
    launch.send(signal.SIGKILL)
    leaves_nothing(launch)
    eventually(lambda: not alive(second), "the reaper has ended")


@pytest.mark.slow
def test_the_warden_ignores_polite_signals(bench):
    launch = bench.up(1, bench.script(UNTIL_TOLD))
    reaper = reaper_of(launch)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        os.kill(reaper, number)
    bench.go()
    assert launch.wait() == 0
    assert "took its place" not in launch.err
    assert not alive(reaper)


@pytest.mark.slow
def test_another_launch_on_the_machine_is_not_touched(bench):
    other = start_family(bench)
    before = sorted(other.left())
    launch = start_family(bench, logs="others")
    launch.send(signal.SIGKILL)
    leaves_nothing(launch)
    assert sorted(other.left()) == before
    assert processes_with(f"LAUNCH_TEST_TOKEN={other.token}")
