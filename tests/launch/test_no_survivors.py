"""No process outlives the launcher, however it ends."""

import os
import signal

import pytest

from tests.harness.processes import alive, children, command_line, processes_with
from tests.harness.waiting import eventually

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
        subprocess.Popen(["setsid", "sleep", "1000"])
        print("UP")
        time.sleep(1000)

    if __name__ == "__main__":
        main()
    """


def reaper_of(launch):
    name = "recover_megatron.launch.reaper"
    reapers = [pid for pid in children(launch.pid) if any(name in word for word in command_line(pid))]
    assert len(reapers) == 1
    return reapers[0]


def start_family(bench, logs="logs"):
    launch = bench.start("--nproc-per-node", 2, "--log-dir", logs, bench.script(FAMILY))
    launch.wait_for("UP", times=2)
    # The launcher, two candidate coordinators, per worker four.
    eventually(lambda: len(launch.left()) == 11, "11 processes run")
    return launch


def test_sigkill_of_the_launcher_leaves_nothing(bench):
    launch = start_family(bench)
    reaper = reaper_of(launch)
    launch.send(signal.SIGKILL)
    assert launch.wait() == -signal.SIGKILL
    eventually(lambda: launch.left() == [], "every process of the launch has ended")
    eventually(lambda: not alive(reaper), "the reaper has ended")


@pytest.mark.slow
def test_sigterm_of_the_launcher_leaves_nothing(bench):
    launch = bench.start("--nproc-per-node", 2, "--grace-seconds", 0.2, bench.script(FAMILY))
    launch.wait_for("UP", times=2)
    reaper = reaper_of(launch)
    launch.send(signal.SIGTERM)
    launch.ends(128 + signal.SIGTERM)
    assert not alive(reaper)


@pytest.mark.slow
def test_sigkill_of_the_launchers_whole_group_leaves_nothing(bench):
    launch = start_family(bench)
    os.killpg(launch.pid, signal.SIGKILL)
    launch.wait()
    eventually(lambda: launch.left() == [], "every process of the launch has ended")


def test_sigkill_of_the_launcher_in_the_middle_of_the_start_leaves_nothing(bench):
    launch = bench.start("--nproc-per-node", 8, bench.script(FAMILY))
    launch.wait_for("starting 8 workers")
    launch.send(signal.SIGKILL)
    launch.wait()
    eventually(lambda: launch.left() == [], "every process of the launch has ended")


@pytest.mark.slow
def test_a_killed_warden_is_replaced_and_the_new_one_does_its_work(bench):
    launch = start_family(bench)
    first = reaper_of(launch)
    os.kill(first, signal.SIGKILL)
    launch.wait_for("took its place")
    second = reaper_of(launch)
    assert second != first
    launch.send(signal.SIGKILL)
    launch.wait()
    eventually(lambda: launch.left() == [], "every process of the launch has ended")
    eventually(lambda: not alive(second), "the reaper has ended")


@pytest.mark.slow
def test_the_warden_ignores_polite_signals(bench):
    launch = bench.start(bench.script("import os, time\nprint('UP')\nwhile not os.path.exists('go'): time.sleep(0.05)"))
    launch.wait_for("UP")
    reaper = reaper_of(launch)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        os.kill(reaper, number)
    (bench.folder / "go").touch()
    assert launch.wait() == 0
    assert "took its place" not in launch.err
    assert not alive(reaper)


def test_workers_json_is_whole_after_sigkill(bench):
    launch = start_family(bench)
    launch.send(signal.SIGKILL)
    launch.wait()
    assert [worker["worker_id"] for worker in bench.workers()] == [0, 1]


@pytest.mark.slow
def test_another_launch_on_the_machine_is_not_touched(bench):
    other = start_family(bench)
    before = sorted(other.left())
    launch = start_family(bench, logs="others")
    launch.send(signal.SIGKILL)
    launch.wait()
    eventually(lambda: launch.left() == [], "every process of the launch has ended")
    assert sorted(other.left()) == before
    assert processes_with(f"LAUNCH_TEST_TOKEN={other.token}")
