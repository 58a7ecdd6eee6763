"""A host loses power: the run goes on without its workers alone, whichever host it was, and soon.

Two hosts share a folder: either may lose its power, and of two that do not hear each other one goes on.
"""

from __future__ import annotations

import json
import subprocess
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.drawn import some
from tests.harness.waiting import DEADLINE, eventually, written_lines

from .hosts import Hosts

pytestmark = pytest.mark.slow

STEPS = """
    import json, os, pathlib, time
    from recover_megatron.membership import EpochRevoked
    from recover_megatron.membership.session import connect

    session = connect()
    while True:
        try:
            plan = session.join({})
            told = {"members": sorted(plan.members), "at": plan.committed, "mono": time.monotonic()}
            with open(f"plans-{os.environ['RANK']}", "a") as file:
                file.write(json.dumps(told) + "\\n")
            for at in range(plan.committed + 1, 1 << 60):
                time.sleep(0.1)
                if pathlib.Path("over").exists():
                    session.give_up(42, "the test is over")
                session.agree(at)
        except EpochRevoked:
            continue
    """


class Run:
    """Two workers a host."""

    def __init__(self, hosts: Hosts, folder: Path, logs: str, *flags: object) -> None:
        """``logs``: the log folder of each, {0} is its number."""
        self.folder = folder
        (folder / "steps.py").write_text(textwrap.dedent(STEPS))
        secret = {"RECOVER_SECRET": "what the hosts share here"}
        self.launchers: dict[int, subprocess.Popen[bytes]] = {}
        for host in hosts:
            argv = ["--nproc-per-node", 2, "--log-dir", logs.format(host), "steps.py", *flags]
            out = folder / f"host{host}.out"
            self.launchers[host] = hosts.recover_run(host, *argv, out=out, environment=secret, cwd=folder)
        eventually(lambda: all(self.plans(rank) for rank in range(2 * hosts.count)), "the run starts")

    def plans(self, rank: int) -> list[dict]:
        return [json.loads(line) for line in written_lines(self.folder / f"plans-{rank}")]

    def goes_on_with(self, left: list[int]) -> bool:
        return all(self.plans(rank)[-1]["members"] == left for rank in left)

    def ends(self, *hosts: int) -> None:
        """As its workers give it up."""
        (self.folder / "over").touch()
        assert {self.launchers[host].wait(DEADLINE) for host in hosts} == {42}


@pytest.mark.parametrize("lost", [1, 2])
def test_a_host_without_power_costs_its_own_workers_alone(three_hosts: Hosts, tmp_path: Path, lost: int) -> None:
    """Host 1 has the coordinator that leads."""
    run = Run(three_hosts, tmp_path, "logs{0}")
    left = [rank for rank in range(6) if rank // 2 != lost - 1]
    three_hosts.power_off(lost)
    lost_at = time.monotonic()
    eventually(lambda: run.goes_on_with(left), "the others go on")
    print(f"host {lost}: {max(run.plans(rank)[-1]['mono'] for rank in left) - lost_at:.1f} s")
    others = [host for host in three_hosts if host != lost]
    run.ends(*others)
    assert all(plan["members"] in (left, list(range(6))) for rank in left for plan in run.plans(rank))
    logs = [path for host in others for path in (tmp_path / f"logs{host}").glob("events-*.jsonl")]
    events = [json.loads(line) for path in logs for line in path.read_text().splitlines()]
    assert {event["worker"] for event in events if event["event"] == "fault"} == set(range(6)) - set(left)


@pytest.fixture
def two_hosts(can_have_hosts: None) -> Iterator[Hosts]:
    with Hosts(2) as hosts:
        yield hosts


class TwoHosts(Run):
    """The log folder is one."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        super().__init__(hosts, folder, "logs", "--recover-hang-timeout", "3600")
        assert "either half of the workers may be lost: the lease is at" in (folder / "host1.out").read_text()

    def alone(self, host: int) -> bool:
        return self.goes_on_with([2 * host - 2, 2 * host - 1])

    def ends_with(self, host: int) -> None:
        """It ends on this host, which has had the lease."""
        self.ends(host)
        files = sorted((self.folder / "logs").glob("lease-*.*"))
        assert [json.loads(path.read_text())["members"] for path in files] == [[[2 * host - 2, 2 * host - 1]]]


@pytest.mark.parametrize("lost", some("host of two", [1, 2], 1))
def test_either_host_of_two_may_lose_its_power(two_hosts: Hosts, tmp_path: Path, lost: int) -> None:
    """Host 1 has the coordinator that leads, and the store."""
    run = TwoHosts(two_hosts, tmp_path)
    two_hosts.power_off(lost)
    other = 3 - lost
    eventually(lambda: run.alone(other), "the other host goes on, without waiting for the hang timeout")
    run.ends_with(other)


def test_of_two_hosts_that_do_not_hear_each_other_one_goes_on(two_hosts: Hosts, tmp_path: Path) -> None:
    run = TwoHosts(two_hosts, tmp_path)
    two_hosts.cable(2, up=False)
    eventually(lambda: run.alone(1) or run.alone(2), "one of them goes on")
    winner = 1 if run.alone(1) else 2
    assert run.launchers[3 - winner].wait(DEADLINE) == 11
    two_hosts.cable(2, up=True)
    assert not run.alone(3 - winner)
    run.ends_with(winner)
