"""Real launchers: every node of the launch is lost and replaced, and the run has a coordinator all the same."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from recover_megatron.membership.records import from_runs
from tests.harness.waiting import eventually
from tests.launch.conftest import SECRET, Bench, Launch
from tests.launch.test_newcomers import SCRIPT, awaits
from tests.launch.test_several_nodes import kill_nodes

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("several nodes")]

JOIN = re.compile(r"recover-run --join --recover-coordinator (\S+) (.*)")
OWN = re.compile(r"this node has a candidate coordinator, too: (\S+)")
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
    launched = bench.nodes(2, *SCRIPT, per_node=1, environment=ENVIRONMENT)
    launched[0].wait_for('"event": "plan"')
    found = JOIN.search(launched[0].err)
    assert found is not None, launched[0].err
    addresses, rest = [found[1]], found[2].split()
    joined: list[Launch] = []

    def join() -> Path:
        """The log of the worker that is new."""
        folder = f"joined-{len(joined)}"
        how = ["--join", "--recover-coordinator", ",".join(addresses), *rest, "--log-dir", folder]
        launch = bench.start(*how, *SCRIPT, environment=ENVIRONMENT)
        joined.append(launch)
        launch.wait_for('"event": "plan"')
        launch.wait_for("this node has a candidate coordinator, too")
        own = OWN.search(launch.err)
        assert own is not None
        addresses.append(own[1])
        eventually(lambda: is_told(own[1]), "all are told of that candidate")
        return worker_log(bench, folder)

    def newcomer(number: int) -> int:
        return int(bench.workers(f"joined-{number}")[0]["worker_id"])

    def holder() -> set[int]:
        """The members of the side that has the lease; nobody: nobody has had it."""
        files = sorted((bench.folder / "logs").glob("lease-*.[0-9]"))
        return {*from_runs(json.loads(files[-1].read_text())["members"])} if files else set()

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
    files = sorted((bench.folder / "logs").glob("lease-*.[0-9]"))
    claims = [from_runs(json.loads(file.read_text())["members"]) for file in files]
    # What came last may have come too late to be written before the end.
    assert claims[:3] == [{newcomer(0)}, {newcomer(0), newcomer(1)}, {newcomer(1)}], claims
