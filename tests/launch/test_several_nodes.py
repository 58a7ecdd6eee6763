"""The control plane of several nodes: a candidate coordinator on each of the first three, and no node that all need."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from pathlib import Path

import pytest

from recover_megatron.launch.workers.states import LEFT_OUT
from recover_megatron.membership.records import from_runs
from tests.drawn import some
from tests.examples.launching import losses as losses_in
from tests.harness import REPOSITORY
from tests.harness.patience import patient
from tests.harness.processes import alive, command_line, free_port, stopped
from tests.harness.waiting import eventually

from .conftest import IN_THE_RUN, SECRET, Bench, Launch
from .test_control_plane import USES_IT
from .test_newcomers import HELD as UNTIL_GO
from .test_newcomers import SCRIPT as AGREES
from .test_newcomers import awaits
from .test_store import UNTIL_TOLD

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("several nodes")]

ITERATIONS = 120
PLAIN = (REPOSITORY / "examples" / "plain_pytorch.py", "--iterations", ITERATIONS)
HELD = (REPOSITORY / "tests" / "examples" / "held.py", ITERATIONS - 20, "go", *PLAIN)
"""It does not end before ``bench.go``, so that whoever is to be killed in it is still there."""
SHOW = """
    import os
    print("COORDINATORS", os.environ.get("RECOVER_COORDINATOR"), flush=True)
    print("NODE", os.environ.get("RECOVER_NODE_AGENT"), os.environ.get("RECOVER_HOST"), flush=True)
    """


def losses(bench: Bench, worker: int) -> dict[int, float]:
    return losses_in(bench.folder / "logs", worker)


def wait_for_iteration(bench: Bench, worker: int, iteration: int) -> None:
    log = bench.folder / "logs" / f"worker-{worker}.log"
    eventually(lambda: log.exists() and iteration in losses(bench, worker), f"worker {worker} at {iteration}")


def kill_nodes(*launches: Launch) -> None:
    """As hosts that lose their power in the same moment: every process at once.

    All are stopped first: between two kills a worker could turn to another coordinator, a launcher tell of a death, or
    a coordinator make a plan without those that are dead already.
    """
    doomed: list[int] = []
    for launch in launches:
        found = launch.left()
        assert launch.pid in found
        assert len(found) >= 3  # launcher, reaper, workers
        doomed += found

    def signal_all(number: int) -> None:
        for pid in doomed:
            with contextlib.suppress(ProcessLookupError):  # it has ended, or a launcher's death has ended it already
                os.kill(pid, number)

    signal_all(signal.SIGSTOP)
    eventually(lambda: all(stopped(pid) for pid in doomed), "the nodes stand still")
    signal_all(signal.SIGKILL)
    eventually(lambda: not any(alive(pid) for pid in doomed), "the nodes are gone")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    with Bench(tmp_path_factory.mktemp("undisturbed")) as bench:
        for launch in bench.nodes(3, *PLAIN):
            assert launch.wait() == 0, launch.err
        reference = losses(bench, 0)
        assert sorted(reference) == list(range(1, ITERATIONS + 1))
        assert [losses(bench, worker) for worker in range(1, 6)] == [reference] * 5
    return reference


@pytest.mark.slow
@pytest.mark.parametrize("victim", some("node", [0, 1, 2], 1))
def test_a_node_that_dies_whole_takes_neither_the_coordinator_nor_the_store_from_the_others(
    bench: Bench, undisturbed: dict[int, float], victim: int
) -> None:
    """Node 0 hosts the coordinator that leads, and the store."""
    started = bench.nodes(3, *HELD)
    started[0].wait_for("all 3 nodes take part")
    wait_for_iteration(bench, 2 * victim, 10)
    kill_nodes(started[victim])
    bench.go()
    survivors = [launch for node, launch in enumerate(started) if node != victim]
    assert [launch.wait() for launch in survivors] == [0, 0], [launch.err for launch in survivors]
    for worker in range(6):
        if worker // 2 == victim:
            assert len(losses(bench, worker)) < ITERATIONS
        else:
            assert losses(bench, worker) == pytest.approx(undisturbed, rel=1e-10)
    assert len(list((bench.folder / "logs").glob("events-*.jsonl"))) == 3
    ends = [end for node in range(3) if node != victim for end in bench.events("stop", candidate=node)]
    assert [end["code"] for end in ends] == [0]


@pytest.mark.slow
def test_all_workers_are_told_the_same_candidates_in_the_order_of_the_nodes(bench: Bench) -> None:
    started = bench.nodes(4, bench.script(SHOW))
    assert [launch.wait() for launch in started] == [0] * 4, [launch.err for launch in started]
    told = re.findall(r"COORDINATORS (\S+)", "".join(launch.out for launch in started))
    assert len(told) == 8
    assert len(set(told)) == 1
    assert len(set(told[0].split(","))) == 3  # nodes 0, 1 and 2; node 3 hosts none
    nodes = [set(re.findall(r"NODE (\S+) 127\.0\.0\.1", launch.out)) for launch in started]
    assert [len(names) for names in nodes] == [1] * 4
    assert len(set.union(*nodes)) == 4


@pytest.mark.slow
def test_every_launcher_takes_the_verdict_of_the_coordinator(bench: Bench) -> None:
    """Both workers of node 1 are killed after their last commit: for all launchers the run is finished all the same."""
    started = bench.nodes(2, bench.script(USES_IT), 2, 3)
    assert [launch.wait() for launch in started] == [0, 0], [launch.err for launch in started]
    assert "killed by SIGKILL" in started[1].err


@pytest.mark.slow
def test_a_launcher_without_workers_keeps_its_candidate_up_until_the_run_is_over(bench: Bench) -> None:
    first, second = bench.nodes(2, bench.script(IN_THE_RUN))
    for launch in (first, second):
        launch.wait_for("JOINED", times=2)
    for worker in (2, 3):
        bench.kill(worker, 4)
    second.wait_for("waiting until the coordinator reports how the run ends")
    coordinators = [pid for pid in second.left() if "--listen-fd" in command_line(pid)]
    assert len(coordinators) == 1
    assert second.process.poll() is None
    bench.go()
    assert (first.wait(), second.wait()) == (0, 0), first.err + second.err


@pytest.mark.slow
def test_nodes_without_a_secret_have_no_coordinator_and_say_so_once(bench: Bench) -> None:
    started = bench.nodes(2, bench.script(SHOW), environment={})
    assert [launch.wait() for launch in started] == [0, 0]
    for launch in started:
        assert launch.out.count("COORDINATORS None") == 2
        assert launch.err.count("RECOVER_SECRET_FILE") == 1


@pytest.mark.parametrize(
    ("environment", "flags", "said"),
    [
        ({}, ["--recover"], "a run on several nodes needs a shared secret: set RECOVER_SECRET"),
        ({"RECOVER_SECRET": "brief"}, [], "secret"),
    ],
    ids=["none", "one that cannot be used"],
)
def test_without_a_good_secret_recover_over_several_nodes_is_refused(
    bench: Bench, environment: dict[str, str], flags: list[str], said: str
) -> None:
    nodes = ["--nnodes", 2, "--master-port", free_port()]
    launch = bench.run(*nodes, bench.script(UNTIL_TOLD), *flags, environment=environment, ends=2)
    assert said in launch.err
    assert "brief" not in launch.err
    assert "UP" not in launch.out


@pytest.mark.slow
def test_a_node_without_the_secret_that_node_0_has_is_refused(bench: Bench) -> None:
    script = bench.script(UNTIL_TOLD)
    nodes = ["--nnodes", 2, "--master-port", free_port(), "--rendezvous-timeout", patient(120)]
    first = bench.start(*nodes, "--node-rank", 0, script, environment=SECRET)
    second = bench.run(*nodes, "--node-rank", 1, script, ends=2)
    assert "no secret here (node 1) but one on node 0" in second.err
    first.wait_for("a message for node 1 is ignored: its writer does not have the job's secret")
    first.send(signal.SIGTERM)
    assert first.wait() == 128 + signal.SIGTERM
    assert "UP" not in first.out + second.out


def test_nodes_with_different_flags_are_told_before_a_worker_starts(bench: Bench) -> None:
    options = ["--nnodes", 2, "--nproc-per-node", 1, "--master-port", free_port()]
    script = bench.script("raise SystemExit('a worker was started')")
    first = bench.start(*options, "--node-rank", 0, script, "--recover", "--lr", "1", environment=SECRET)
    second = bench.start(*options, "--node-rank", 1, script, "--recover", "--lr", "2", environment=SECRET)
    assert (second.wait(), first.wait()) == (2, 1)
    for launch in (first, second):
        assert "the script's flags here (node 1) differ from those of node 0: --lr has another value" in launch.err
        assert "a worker was started" not in launch.out + launch.err


@pytest.mark.parametrize("environment", [SECRET, {}], ids=["secret", "none"])
def test_a_node_that_is_refused_before_it_meets_the_others_is_not_waited_for(
    bench: Bench, environment: dict[str, str]
) -> None:
    """Node 0 learns what is wrong on the other host, and nobody waits until --rendezvous-timeout."""
    options = ["--nnodes", 2, "--master-port", free_port()]
    first = bench.start(*options, "--node-rank", 0, bench.script(UNTIL_TOLD), environment=environment)
    second = bench.start(*options, "--node-rank", 1, "missing.py", environment=environment)
    assert (second.wait(), first.wait()) == (2, 1)
    assert re.search(r"the launcher of node 1 on host \S+ was refused: script missing.py does not exist", first.err)
    assert "the launch cannot be complete" in first.err
    assert not environment or "UP" not in first.out, "without a coordinator nobody waits for the others"


def test_where_node_0_is_refused_nobody_waits_for_it(bench: Bench) -> None:
    options = ["--nnodes", 3, "--master-port", free_port()]
    scripts = ["missing.py", bench.script(UNTIL_TOLD), "missing.py"]
    started = [
        bench.start(*options, "--node-rank", node, script, environment=SECRET) for node, script in enumerate(scripts)
    ]
    assert [launch.wait() for launch in started] == [2, 2, 2]
    assert "refused by node 0: node 0 cannot start: script missing.py does not exist" in started[1].err
    assert started[0].err.count("\n") == started[2].err.count("\n") == 1
    assert "UP" not in started[1].out


def test_a_flag_that_may_differ_is_not_compared(bench: Bench) -> None:
    options = ["--nnodes", 2, "--nproc-per-node", 1, "--master-port", free_port(), "--log-dir", "logs"]
    script = bench.script(USES_IT)
    may = ["--recover", "--recover-may-differ", "lr", "--lr"]
    started = [bench.start(*options, "--node-rank", n, script, *may, n + 5, environment=SECRET) for n in (0, 1)]
    assert [launch.wait() for launch in started] == [0, 0], [launch.err for launch in started]


JOIN = re.compile(r"recover-run --join --recover-coordinator (\S+) (.*)")
OWN = re.compile(r"this node also hosts a candidate coordinator: (\S+)")
ENVIRONMENT = {**awaits(3), **SECRET}
"""The run ends when three newcomers have been in it at once."""


def last_members(log: Path) -> list[int]:
    """Of the last plan that a worker has told."""
    lines = [json.loads(line) for line in log.read_text().splitlines() if line[:1] == "{" and line[-1:] == "}"]
    return next((line["members"] for line in reversed(lines) if line["event"] == "plan"), [])


def worker_log(bench: Bench, folder: str) -> Path:
    """Of the one worker of a launcher that joined."""
    (worker,) = bench.workers(folder)
    return bench.folder / folder / f"worker-{worker['worker_id']}.log"


def test_the_nodes_of_a_launch_are_replaced_one_after_the_other_and_the_run_goes_on_to_its_end(bench: Bench) -> None:
    """Whoever is left is half of the run each time; node 0 has the store, too.

    Of the first loss the coordinator is told by the kernel of the dead worker.  It is itself lost with the others: who
    takes over cannot know whether they are running, so needs the lease.
    """
    launched = bench.nodes(2, *AGREES, per_node=1, environment=ENVIRONMENT)
    launched[0].wait_for('"event": "plan"')
    found = JOIN.search(launched[0].err)
    assert found is not None, launched[0].err
    addresses, rest = [found[1]], found[2].split()
    joined: list[Launch] = []

    def join() -> Path:
        """The log of the worker that is new."""
        folder = f"joined-{len(joined)}"
        how = ["--join", "--recover-coordinator", ",".join(addresses), *rest, "--log-dir", folder]
        launch = bench.start(*how, *AGREES, environment=ENVIRONMENT)
        joined.append(launch)
        launch.wait_for('"event": "plan"')
        launch.wait_for("this node also hosts a candidate coordinator")
        own = OWN.search(launch.err)
        assert own is not None
        addresses.append(own[1])
        eventually(lambda: is_told(own[1]), "all are told of that candidate")
        return worker_log(bench, folder)

    def newcomer(number: int) -> int:
        return int(bench.workers(f"joined-{number}")[0]["worker_id"])

    def holder() -> set[int]:
        """The members of the side that has the lease; nobody: nobody has had it."""
        claims = bench.lease_claims()
        return {*from_runs(claims[-1])} if claims else set()

    def is_told(address: str) -> bool:
        logs = [line for path in bench.folder.glob("*/events-*.jsonl") for line in path.read_text().splitlines()]
        return any('"event":"candidates"' in line and address in line for line in logs)

    def lose(node: Launch, left: Path) -> None:
        # The lease is told of who has come after their first plan: a loss before that is one of the holder's.
        eventually(lambda: not holder() or holder() >= set(last_members(left)), "the lease knows who has come")
        kill_nodes(node)
        eventually(lambda: len(last_members(left)) == 1, "the run goes on without that node")

    lose(launched[1], bench.folder / "logs" / "worker-0.log")
    first = join()
    lose(launched[0], first)
    del addresses[0]  # of the launch nobody is left
    second = join()
    lose(joined[0], second)
    del addresses[0]
    join()
    join()
    assert [launch.wait() for launch in joined[1:]] == [0, 0, 0], [launch.err for launch in joined]
    assert last_members(second) == sorted(newcomer(n) for n in (1, 2, 3))
    assert all(launch.left() == [] for launch in joined)
    claims = [from_runs(claim) for claim in bench.lease_claims()]
    # What came last may have come too late to be written before the end.
    assert claims[:3] == [{newcomer(0)}, {newcomer(0), newcomer(1)}, {newcomer(1)}], claims


def test_the_launcher_of_a_lost_node_that_is_started_once_more_says_how_to_come_back(bench: Bench) -> None:
    """By a supervisor, with its own command line; node 0 where it shares the folder of the others, and where not."""
    port = free_port()

    def start(node: int, folder: str = "logs") -> Launch:
        options = ["--nnodes", 3, "--nproc-per-node", 1, "--master-port", port, "--log-dir", folder]
        return bench.start(*options, "--node-rank", node, *AGREES, environment={**SECRET, **UNTIL_GO})

    started = [start(node) for node in range(3)]
    for launch in started:
        launch.wait_for('"event": "plan"')
    kill_nodes(started[2])
    again = start(2)
    again.ends(LEFT_OUT)
    assert again.err.count("waiting 24 s for its next message") == 1
    eventually(lambda: last_members(bench.folder / "logs" / "worker-0.log") == [0, 1], "the others go on")
    kill_nodes(started[0])
    for folder, why in (("own", "on host"), ("logs", "is in use by the other nodes of this run")):
        again = start(0, folder)
        again.ends(LEFT_OUT)
        assert why in again.err
        assert "the run continues without this node" in again.err
        assert JOIN.search(again.err), again.err
    bench.go()
    started[1].ends(0)
