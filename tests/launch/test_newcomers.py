"""Workers that a launcher starts while the run goes on: in place of others, as spares, for a run of other launchers."""

import json
import os
import re
import signal
from types import SimpleNamespace

import pytest

from recover_megatron.launch.workers import successors
from recover_megatron.launch.workers.states import WorkerProcess
from recover_megatron.launch.workers.successors import Successors
from recover_megatron.membership.records import MAX_WORKERS
from tests.harness import REPOSITORY
from tests.harness.patience import patient
from tests.harness.waiting import eventually

from .conftest import SECRET, spec_of

pytestmark = pytest.mark.slow

AGREEING = REPOSITORY / "tests" / "agreeing.py"
TIMES = ["--recover-heartbeat-interval", 0.5, "--recover-heartbeat-timeout", patient(3)]
TIMES += ["--recover-hang-timeout", patient(8)]
SCRIPT = [AGREEING, 10, 0.05, "--recover", *TIMES]
"""Ten iterations from the plan on that has all newcomers awaited."""
LONGER = [AGREEING, 20, 0.05, "--recover", *TIMES]
"""The same for what is to happen after that plan: with ``HELD`` the iterations are counted from ``bench.go`` on."""
HELD = {"AGREEING_UNTIL": "go"}
FAULTS = """
    import errno, os, sys, threading, time
    if "recover_megatron.launch" in sys.orig_argv:  # in the launcher alone
        fault, start, posix_spawn = os.environ["FAULT"], threading.Thread.start, os.posix_spawn

        def start_thread(thread):
            if fault == "log" and thread.name.endswith("worker-3.log"):
                raise RuntimeError("can't start new thread")
            if fault == "store" and thread.name == "recover-launch-store":
                thread._target, serve = serve_late, thread._target
                thread._args = (serve,)
            start(thread)

        def serve_late(serve):
            while not os.path.exists("trains"):
                time.sleep(0.01)
            sys.modules["torch"] = None  # so its import fails
            serve()

        def start_process(path, command, environment, **options):
            if environment.get("RECOVER_WORKER_ID") == "3" and fault == "process":
                raise OSError(errno.EAGAIN, "no process is left")
            if environment.get("RECOVER_WORKER_ID") == "3" and fault == "launcher":
                raise ZeroDivisionError
            return posix_spawn(path, command, environment, **options)

        threading.Thread.start, os.posix_spawn = start_thread, start_process
    """


def awaits(newcomers: int | list[int], strikes: object = ()) -> dict[str, str]:
    return {"AGREEING_AWAITS": json.dumps(newcomers), "AGREEING_STRIKES": json.dumps(strikes)}


def said(bench, worker: int) -> list[dict]:
    return [json.loads(line) for line in bench.log(worker).splitlines() if line[:1] == "{"]


def plans(bench, worker: int) -> list[list[int]]:
    return [line["members"] for line in said(bench, worker) if line["event"] == "plan"]


def ended(worker: WorkerProcess, status: int) -> WorkerProcess:
    worker.end(status, 1.0)
    return worker


# -- the decisions ----------------------------------------------------------------------------------------------------


def test_no_id_is_used_twice_by_any_launcher():
    used: list[int] = []
    for node in range(3):
        plan = spec_of(nnodes=3, node_rank=node, spares=2, max_restarts=3)
        workers = successors.launched(plan)
        used += [worker.worker_id for worker in workers]
        replacements = successors.Replacements(plan)
        worker = workers[1]
        for _ in range(3):
            worker = replacements.of(ended(worker, -9), 0)
            used.append(worker.worker_id)
        assert replacements.of(ended(worker, -9), 0) is None
    assert len(used) == len(set(used)) == 12 + 2 + 9
    assert sorted(used)[:14] == list(range(14))
    assert max(used) < successors.JOINED_FROM


def test_spares_are_on_the_last_node_behind_its_workers():
    assert [len(successors.launched(spec_of(nnodes=2, node_rank=node, spares=2))) for node in (0, 1)] == [4, 6]
    spare = successors.launched(spec_of(nnodes=2, node_rank=1, spares=2))[4]
    assert (spare.worker_id, spare.local_rank, spare.rank) == (8, 4, None)


def test_a_launcher_that_joins_takes_ids_that_nobody_has_for_itself_and_its_restarts():
    plan = spec_of(nproc_per_node=2, max_restarts=2, joins=(("h", 1),), joined_world_size=4)
    draws = iter([5, 0, 7, 100])
    taken = frozenset({successors.JOINED_FROM + 8, successors.JOINED_FROM + 3})
    workers = successors.joined(plan, taken, lambda below: next(draws))
    assert [worker.worker_id for worker in workers] == [successors.JOINED_FROM + 100, successors.JOINED_FROM + 101]
    replacement = successors.Replacements(plan).of(ended(workers[1], -9), workers[0].worker_id)
    assert (replacement.worker_id, replacement.local_rank) == (successors.JOINED_FROM + 102, 1)
    last = successors.joined(plan, frozenset(), lambda below: below - 1)
    assert last[-1].worker_id + plan.max_restarts < MAX_WORKERS


@pytest.mark.parametrize("status", [0, 10, 11, 12, 13])
def test_who_finished_or_ended_by_a_verdict_is_not_started_again(status):
    plan = spec_of(max_restarts=1)
    replacements = successors.Replacements(plan)
    workers = successors.launched(plan)
    assert replacements.of(ended(workers[0], status), 0) is None
    replacements.evict.add(1)
    assert replacements.of(ended(workers[1], -9), 0) is None
    assert replacements.of(ended(workers[2], 1), 0) is not None


def test_nobody_is_started_where_a_node_is_drained_and_somebody_is_again_where_it_stays_after_all():
    nothing = SimpleNamespace(first_id=0, add=lambda workers: None, last_words={})
    plan = spec_of(max_restarts=2)
    workers = successors.launched(plan)
    starting = Successors(plan, None, nothing, print, print, print, print)
    assert [starting.stop(), starting.stop()] == [True, False]
    assert starting.of(ended(workers[0], -9)) is None
    assert [starting.stop(False), starting.stop(False)] == [True, False]
    assert starting.of(ended(workers[1], -9)).replaces == 1


# -- real processes ---------------------------------------------------------------------------------------------------


def training(bench, workers: int, restarts: int, *argv: object, environment: dict[str, str] = HELD):
    """A launch, when all its workers train."""
    options = ["--nproc-per-node", workers, "--max-restarts", restarts, "--log-dir", "logs"]
    launch = bench.start(*options, *argv, environment=environment)
    launch.wait_for('"event": "plan"', times=workers)
    return launch


def test_a_killed_worker_is_started_again_as_another_and_the_run_ends_well(bench):
    launch = training(bench, 3, 1, *SCRIPT, "--recover-device", "cpu", environment=awaits(1))
    bench.kill(1, 3)
    launch.ends()
    assert "worker 3 is started in its place" in launch.err
    record = bench.workers()[3]
    assert (record["replaces"], record["rank"], record["local_rank"], record["state"]) == (1, 1, 1, "finished")
    starts = said(bench, 3)[0]
    assert (starts["RANK"], starts["LOCAL_RANK"], starts["RECOVER_JOIN"]) == ("1", "1", "1")
    assert "RECOVER_SPARE" not in starts
    assert said(bench, 0)[0]["RECOVER_REPLACED"] == "1"
    assert starts["RECOVER_NODE_NAME"] == said(bench, 0)[0]["RECOVER_NODE_NAME"]
    assert "RECOVER_JOIN" not in said(bench, 0)[0]
    assert plans(bench, 0)[-1] == [0, 2, 3]


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("log", "worker-3.log waits in memory, because no thread can be started"),
        ("process", "worker 3 cannot be started: [Errno 11] no process is left"),
        ("launcher", "this is a bug in recover-run"),
        ("store", "the store cannot be served"),
    ],
    ids=["log", "process", "launcher", "store"],
)
def test_what_the_launcher_cannot_do_for_a_newcomer_ends_nobody(bench, fault, told):
    """A limit of processes or threads, and a fault of the launcher's own, when a worker is started in place of one.

    And while they train: the store fails.
    """
    bench.script(FAULTS, "sitecustomize.py")
    environment = {**HELD, "PYTHONPATH": f"{bench.folder}:{REPOSITORY}", "FAULT": fault}
    launch = training(bench, 3, 1, *LONGER, environment=environment)
    if fault == "store":
        bench.go("trains")
    else:
        bench.kill(1, 3)
    launch.wait_for(told)
    bench.go()
    launch.ends()
    assert launch.err.count("bug in recover-run") == (fault == "launcher")
    states = [worker["state"] for worker in bench.workers()]
    assert states[:3] == ["finished", "finished" if fault == "store" else "killed", "finished"]
    assert fault == "store" or len(plans(bench, 0)) >= 2


def test_restarts_are_counted_for_the_whole_node(bench):
    """The first replacement fails, too, and has one; there is none for the next."""
    environment = {**HELD, **awaits([5, 3], [[1, 3, "kill"], [4, 0, 7]])}
    options = ["--nproc-per-node", 2, "--max-restarts", 2, "--log-dir", "logs"]
    launch = bench.start(*options, *LONGER, "--recover-spares", 2, environment=environment)
    launch.wait_for('"event": "starts", "worker": 2')
    launch.wait_for('"worker": 5, "epoch"')
    # Whoever goes now has no successor.
    bench.kill(2, 6)
    launch.wait_for("worker 2 on ")
    bench.go()
    assert launch.wait() == 0, launch.err
    assert [worker["worker_id"] for worker in bench.workers()] == [0, 1, 2, 3, 4, 5]
    assert [worker["replaces"] for worker in bench.workers()] == [None, None, None, None, 1, 4]
    spare = said(bench, 2)[0]
    assert (spare["RANK"], spare["LOCAL_RANK"], spare["RECOVER_SPARE"]) == ("0", "2", "1")


def test_a_worker_that_the_coordinator_has_put_out_is_not_started_again(bench):
    launch = training(bench, 3, 1, *LONGER)
    bench.kill(1, 3, signal.SIGSTOP)
    launch.wait_for("worker 1 is evicted from the run")
    bench.go()
    assert launch.wait() == 0, launch.err
    assert len(bench.workers()) == 3
    assert "killing it; it is not replaced" in launch.err
    assert re.search(r"worker 1 on \S+ \(pid \d+\) was evicted, and killed by SIGKILL", launch.err)


def test_a_fault_that_every_worker_has_ends_the_run_restarts_or_not(bench):
    environment = awaits(0, [[worker, 5, "fault"] for worker in range(9)])
    options = ["--nproc-per-node", 2, "--max-restarts", 5, "--log-dir", "logs"]
    launch = bench.run(*options, *SCRIPT, environment=environment, ends=1)
    assert "no such token" in launch.err
    # For each of the two at most one, started before the launcher heard that the run is over; no restarts of those.
    assert len(bench.workers()) <= 4


def test_a_newcomer_that_is_not_ready_when_the_run_is_over_is_ended_and_costs_nothing(bench):
    environment = {**HELD, "AGREEING_STRIKES": json.dumps([[1, 5, "kill"]]), "AGREEING_LATE": "1"}
    options = ["--nproc-per-node", 2, "--max-restarts", 1, "--log-dir", "logs"]
    launch = bench.start(*options, *LONGER, environment=environment)  # until worker 2 is there
    launch.ends()
    assert "the run ended before worker 2 had joined it: killing this worker" in launch.err
    assert "1 worker more, started as replacements, had not joined the run yet; exit code 0" in launch.err


def test_spares_do_not_outlive_a_launch_that_fails(bench):
    script = bench.script(
        """
        import os, signal, sys
        if "RECOVER_SPARE" in os.environ:
            print("SPARE")
            open("spare", "w").close()
            signal.pause()
        while not os.path.exists("spare"):
            pass
        sys.exit(3)
        """
    )
    launch = bench.run("--nproc-per-node", 1, script, "--recover", "--recover-spares", 1, ends=3)
    assert "SPARE" in launch.out


def how_to_join(launch) -> str:
    launch.wait_for("recover-run --join")  # on another stream than what its workers say
    return re.search(r"recover-run (--join .*)", launch.err).group(1)


def test_a_second_launcher_joins_a_running_job(bench):
    first = training(bench, 2, 0, *SCRIPT, environment={**awaits(3), **SECRET})
    how = how_to_join(first).split()
    options = ["--nproc-per-node", 2, "--max-restarts", 1, "--log-dir", "joined"]
    second = bench.start(*how, *options, *SCRIPT, environment={**awaits(3), **SECRET})
    eventually(lambda: (bench.folder / "joined" / "workers.json").exists(), "the second launcher has started")
    second.wait_for('"event": "plan"', times=2)
    os.kill(bench.workers("joined", count=2)[0]["pid"], signal.SIGKILL)
    # Three newcomers are awaited and never in one plan; a third launcher brings the last.
    second.wait_for('"event": "plan"', times=4)
    third = bench.start(*how, "--log-dir", "third", *SCRIPT, environment={**awaits(3), **SECRET})
    assert [launch.wait() for launch in (first, second, third)] == [0, 0, 0], (first.err, second.err, third.err)
    ids = [worker["worker_id"] for worker in bench.workers("joined")]
    assert ids == [ids[0], ids[0] + 1, ids[0] + 2]
    assert ids[0] >= successors.JOINED_FROM
    final = plans(bench, 0)[-1]
    assert final[:2] == [0, 1]
    assert set(ids[1:]) < set(final)
    assert len(final) == 5
    assert all(launch.left() == [] for launch in (first, second, third))


def test_a_launcher_that_joins_with_another_world_size_hosts_no_coordinator_and_says_why(bench):
    first = training(bench, 2, 0, *SCRIPT, environment={**awaits(1), **SECRET})
    how = how_to_join(first).replace("--world-size 2", "--world-size 3").split()
    second = bench.start(*how, *SCRIPT, environment={**awaits(1), **SECRET})
    assert [first.wait(), second.wait()] == [0, 0]
    assert "no candidate coordinator on this node: the run was launched with 2 workers, but --world" in second.err
    assert "also hosts a candidate coordinator" not in second.err


def test_a_launcher_that_finds_no_run_to_join_says_so(bench):
    how = ["--join", "--recover-coordinator", "127.0.0.1:9", "--world-size", 2, "--master-port", 9]
    launch = bench.run(*how, "--rendezvous-timeout", 1, *SCRIPT, environment=SECRET, ends=1)
    assert "the run's coordinators are unreachable" in launch.err
    assert "Traceback" not in launch.err


def test_a_launcher_that_joins_with_a_wrong_secret_is_told(bench):
    first = training(bench, 2, 0, *SCRIPT, environment={**awaits(1), **SECRET})
    how = how_to_join(first).split()
    second = bench.run(*how, *SCRIPT, environment={"RECOVER_SECRET": "quite another secret than that"}, ends=1)
    assert "secret" in second.err
    first.send(signal.SIGTERM)
    assert first.wait() == 143
