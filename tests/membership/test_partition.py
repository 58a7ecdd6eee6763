"""Partitions between real processes: each node is a network namespace on a switch; packets vanish, no FIN, no error.

A node is cut off by pulling its cable (both directions), or by giving it a wrong hardware address for the others (only
what it sends is lost). Needs root and network namespaces; skipped loudly where there are none.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from cluster import QUICK, Cluster, cluster

from tests.harness.waiting import DEADLINE
from tests.hosts.hosts import Hosts, unavailable

TIMES = {**QUICK, "hang_timeout": 20.0, "stall_timeout": 6.0}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(why := unavailable()), reason=f"PARTITIONS ARE NOT TESTED WITH A REAL NETWORK: {why}"),
]


def mute(hosts: Hosts, host: int) -> None:
    """What the host sends is lost, what is sent to it arrives."""
    for other in set(hosts) - {host}:
        wrong = ["lladdr", "02:00:00:00:00:fe", "nud", "permanent", "dev", "e0"]
        command = ["ip", "-n", hosts.space(host), "neigh", "replace", hosts.address(other), *wrong]
        subprocess.run(command, check=True, capture_output=True, timeout=DEADLINE)


def start(run: Cluster, hosts: Hosts, per_host: list[int], candidates: list[int]) -> None:
    """Workers on the hosts, from 1 on, and a candidate coordinator on each host of ``candidates``."""
    spaces = [hosts.space(host) for host in candidates]
    run.start_coordinators(sum(per_host), len(candidates), [f"{hosts.address(h)}:0" for h in candidates], spaces)
    for host in (host for host, count in enumerate(per_host, 1) for _ in range(count)):
        run.start_worker(len(run.workers), namespace=hosts.space(host))
    run.all_commit()


@pytest.mark.parametrize("how", ["both directions", "what it sends"])
def test_a_silent_host_is_out_within_the_heartbeat_timeout_and_stops_by_itself(tmp_path: Path, how: str) -> None:
    with cluster(tmp_path, **TIMES) as run, Hosts(3) as hosts:
        start(run, hosts, [2, 1, 1], [1])
        hosts.cable(3, up=False) if how == "both directions" else mute(hosts, 3)
        run.continue_without(3)
        fault = run.wait_event("fault", worker=3)
        assert fault["kind"] == "out"
        assert run.workers[3].exit_code() in (11, 13)
        assert not [line for line in run.workers[3].lines if line["event"] == "plan" and line["epoch"] > 1]


def test_the_half_with_the_coordinator_goes_on_and_the_other_half_stops(tmp_path: Path) -> None:
    with cluster(tmp_path, **TIMES) as run, Hosts(2) as hosts:
        start(run, hosts, [2, 2], [1, 2])
        hosts.cable(2, up=False)
        run.continue_without(2, 3)
        assert run.exit_codes(2, 3) == [11, 11]


def test_a_majority_goes_on_when_the_coordinator_is_cut_off_and_the_minority_stops(tmp_path: Path) -> None:
    with cluster(tmp_path, **TIMES) as run, Hosts(3) as hosts:
        start(run, hosts, [1, 2, 1], [1, 2, 3])
        hosts.cable(1, up=False)
        run.continue_without(0)
        assert run.workers[0].exit_code() == 11
        assert run.coordinators[0].exit_code() == 11


def test_without_a_majority_nobody_goes_on_when_the_coordinators_host_is_lost(tmp_path: Path) -> None:
    with cluster(tmp_path, **TIMES) as run, Hosts(2) as hosts:
        start(run, hosts, [2, 2], [1, 2])
        hosts.cable(1, up=False)  # then its host loses power: nobody on the other side can tell that from a partition
        for process in (run.coordinators[0], run.workers[0], run.workers[1]):
            process.kill()
        assert run.exit_codes(2, 3) == [11, 11]
