"""Training on hosts of which two cannot talk to each other, while both hear everybody else.

It equals training on whole roads.  The smallest number of replicas is left out.  A road that comes back in time costs
nobody its place.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.drawn import some
from tests.harness.forkserver import ForkServer
from tests.harness.waiting import meanwhile, written_lines
from tests.instep.conftest import Reference
from tests.instep.conftest import reference as reference
from tests.instep.runs import LAYOUTS, Case, Layout, Result, check

from .hosts import SWITCH, Hosts

pytestmark = pytest.mark.slow
LAYOUT = {layout.name: layout for layout in [*LAYOUTS, Layout("dp3", 3)]}
ITERATIONS = 30
AT = 5
"""After so many iterations roads break."""
HELD_AT = 20
"""Not begun before they have broken."""
SLOW_TO_SEE_SILENCE = "--recover-heartbeat-timeout 30 --recover-hang-timeout 60".split()
"""For an outage that is to cost nobody its place, however late the test ends it."""
EPOCHS = 12
"""More than any of these runs may need; without a bound there were thousands."""


def run(hosts: Hosts, each: int, case: Case, server: ForkServer, out: Path, spoil: Callable[[], None]) -> Result:
    """Run a case with ``each`` workers on every host; ``spoil`` does something to the roads in the middle.

    The last iterations are made when that is done, however late ``steps.jsonl`` is or the thread that looks at it.
    """
    case = case.altered("pacing.awaiting", f"{HELD_AT}:spoilt:yes")
    ranks = [1 + rank // each for rank in range(case.layout.grid.world)]
    networks = [(hosts.network(host), hosts.address(host)) for host in [*ranks, SWITCH]]

    def look() -> bool:
        if len(written_lines(out / "steps.jsonl")) < AT:
            return False
        try:
            spoil()
        finally:
            (out / "spoilt").write_text("yes")
        return True

    with meanwhile(look):
        return case.run(server, out, networks)


@pytest.mark.parametrize(
    ("name", "each", "how"),
    [
        pytest.param("dp3", 1, "part", id="a replica on each host, packets vanish"),
        pytest.param("pp2-dp3", 2, "refuse", id="replicas over two hosts each, connections are refused"),
    ],
)
def test_two_hosts_that_cannot_talk_to_each_other_do_not_stop_the_run(
    three_hosts: Hosts, forkserver: ForkServer, reference: Reference, tmp_path: Path, name: str, each: int, how: str
) -> None:
    hosts, case = three_hosts, Case(LAYOUT[name], iterations=ITERATIONS, evaluated=True)
    result = run(hosts, each, case, forkserver, tmp_path, lambda: getattr(hosts, how)(2, 3))
    check(result, reference(case))
    assert len(result.plans) <= EPOCHS
    assert len(result.plans[max(result.plans)]["replicas"]) == 2, result.told()
    assert f"({hosts.address(2)}) and worker" in result.said
    assert f"({hosts.address(3)})" in result.said
    assert "is left out" in result.said, result.told()
    assert any("requested a new epoch" in str(event["reason"]) for event in result.events if event["event"] == "revoke")


@pytest.mark.parametrize("how", some("short breaks", ["refuse", "cable"], 1))
def test_a_road_that_comes_back_costs_nobody_its_place(
    three_hosts: Hosts, forkserver: ForkServer, reference: Reference, tmp_path: Path, how: str
) -> None:
    hosts, case = three_hosts, Case(LAYOUT["dp3"], iterations=ITERATIONS, evaluated=True)
    case = case.with_flags(*SLOW_TO_SEE_SILENCE)

    def spoil() -> None:
        if how == "refuse":
            hosts.refuse(2, 3)
        else:
            hosts.cable(3, up=False)
        time.sleep(1)  # the length of the outage
        hosts.mend()

    result = run(hosts, 1, case.altered("pacing.trying"), forkserver, tmp_path, spoil)
    check(result, reference(case))
    assert set(result.replicas) == {3}
    assert len(result.plans) <= EPOCHS
