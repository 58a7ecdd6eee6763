"""A host loses power: the run goes on without its workers alone, whichever host it was, and soon."""

from __future__ import annotations

import json
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.harness.waiting import DEADLINE, eventually, written_lines

from .hosts import Hosts

REPOSITORY = Path(__file__).resolve().parents[2]
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


@pytest.mark.slow
@pytest.mark.parametrize("lost", [1, 2])
def test_a_host_without_power_costs_its_own_workers_alone(three_hosts: Hosts, tmp_path: Path, lost: int) -> None:
    """Host 1 has the coordinator that leads."""
    hosts = three_hosts
    (tmp_path / "steps.py").write_text(textwrap.dedent(STEPS))
    environment = {"RECOVER_SECRET": "what the hosts share here", "PYTHONPATH": str(REPOSITORY)}
    launchers = {}
    for host in hosts:
        command = [sys.executable, "-m", "recover_megatron.launch", "--nnodes", 3, "--node-rank", host - 1]
        command += ["--nproc-per-node", 2, "--master-addr", hosts.address(1), "--master-port", 29400]
        command += ["--log-dir", f"logs{host}", "steps.py"]
        out = tmp_path / f"host{host}.out"
        launchers[host] = hosts.start(host, command, out, environment=environment, cwd=tmp_path)

    def plans(rank: int) -> list[dict]:
        path = tmp_path / f"plans-{rank}"
        return [json.loads(line) for line in written_lines(path)]

    eventually(lambda: all(plans(rank) for rank in range(6)), "the run starts")
    left = [rank for rank in range(6) if rank // 2 != lost - 1]
    hosts.power_off(lost)
    lost_at = time.monotonic()
    eventually(lambda: all(plans(rank)[-1]["members"] == left for rank in left), "the others go on")
    print(f"host {lost}: {max(plans(rank)[-1]['mono'] for rank in left) - lost_at:.1f} s")
    (tmp_path / "over").touch()
    assert {launchers[host].wait(DEADLINE) for host in hosts if host != lost} == {42}
    assert all(plan["members"] in (left, list(range(6))) for rank in left for plan in plans(rank))
    logs = [path for host in hosts if host != lost for path in (tmp_path / f"logs{host}").glob("events-*.jsonl")]
    events = [json.loads(line) for path in logs for line in path.read_text().splitlines()]
    assert {event["worker"] for event in events if event["event"] == "fault"} == set(range(6)) - set(left)
