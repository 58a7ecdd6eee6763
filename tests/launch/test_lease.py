"""The lease of a launch over two nodes: either of them may be lost, whole, and the run goes on."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from recover_megatron.launch import leasing
from tests.drawn import some
from tests.harness.processes import free_port
from tests.harness.waiting import eventually

from .conftest import SECRET, Bench, Launch, plan_of
from .test_several_nodes import HELD, PLAIN, kill_nodes, losses, wait_for_iteration

FIRST = plan_of(nnodes=2, lease="auto")


@pytest.mark.parametrize(
    ("lease", "same_folder", "why_not"),
    [("auto", True, ""), ("auto", False, "node 1: "), ("off", True, "node 0: --lease off"), ("path", False, "")],
)
def test_a_lease_is_there_where_all_candidates_see_the_same_folder(
    tmp_path: Path, lease: str, same_folder: bool, why_not: str
) -> None:
    (other := tmp_path / "other").mkdir()
    lease = str(tmp_path / "shared") if lease == "path" else lease
    first = replace(FIRST, log_dir=tmp_path, lease=lease)
    second = replace(first, node_rank=1, log_dir=tmp_path if same_folder else other)
    trial = leasing.LeaseTrial(first)
    found = trial.end({1: leasing.try_lease(second, first.run_id)})
    assert found.startswith(why_not)
    assert bool(found) == bool(why_not)
    assert list(tmp_path.rglob("*.try")) == []
    assert leasing.lease_path(second, first.run_id) is None or not why_not or not same_folder


@pytest.mark.parametrize("answer", [None, {}, {"word": "another"}, ["word"], {"reason": 3}])
def test_a_node_that_does_not_tell_the_word_has_no_lease(tmp_path: Path, answer: object) -> None:
    assert leasing.LeaseTrial(replace(FIRST, log_dir=tmp_path)).end({1: answer}).startswith("node 1: ")


def test_storage_that_takes_no_links_or_hangs_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bool:
        raise PermissionError(1, "Operation not permitted", "there")

    plan = replace(FIRST, log_dir=tmp_path)
    monkeypatch.setattr(leasing, "publish", refuse)
    assert "Operation not permitted" in leasing.LeaseTrial(plan).end({})
    monkeypatch.setattr(leasing, "TRY_SECONDS", 0.05)
    monkeypatch.setattr(leasing, "publish", lambda *_: signal.pause())
    assert "has not answered for 0.05 s" in leasing.LeaseTrial(plan).end({})


def test_a_word_that_is_there_already_is_no_proof(tmp_path: Path) -> None:
    plan = replace(FIRST, log_dir=tmp_path)
    path = leasing.lease_path(plan, plan.run_id)
    assert path is not None
    Path(f"{path}.try").write_text("a stranger's")
    assert "is there already" in leasing.LeaseTrial(plan).end({})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Of one worker: the losses are those of any number of them."""
    with Bench(tmp_path_factory.mktemp("undisturbed")) as bench:
        bench.run("--log-dir", "logs", *PLAIN)
        return losses(bench, 0)


pytest_group = pytest.mark.xdist_group("several nodes")


def holders(bench: Bench) -> list[list[list[int]]]:
    files = sorted(path for path in (bench.folder / "logs").glob("lease-*.*"))
    return [json.loads(path.read_text())["members"] for path in files]


@pytest.mark.slow
@pytest_group
@pytest.mark.parametrize("victim", some("node of two", [0, 1], 1))
def test_a_run_of_two_nodes_survives_the_loss_of_either(
    bench: Bench, undisturbed: dict[int, float], victim: int
) -> None:
    """Node 0 has the store and the coordinator that leads: nobody can tell its loss from a cut cable."""
    started = bench.nodes(2, *HELD)
    wait_for_iteration(bench, 2 * victim, 10)
    kill_nodes(started[victim])
    bench.go()
    other = started[1 - victim]
    assert other.wait() == 0, other.err
    left = [worker for worker in range(4) if worker // 2 != victim]
    for worker in left:
        assert losses(bench, worker) == pytest.approx(undisturbed, rel=1e-10)
    assert "either half of the workers may be lost: the lease is at" in started[0].err
    assert holders(bench) == ([[[2, 3]]] if victim == 0 else [])
    if victim == 0:
        formed = [plan for plan in bench.events("plan", candidate=1) if plan["members"] == [left]]
        leads = bench.events("lead", "fault", candidate=1)
        assert formed[0]["mono"] - leads[0]["mono"] < 30.0, "it does not wait for the hang timeout, which is twice that"


@pytest.mark.slow
@pytest_group
def test_a_node_with_fewer_workers_left_survives_the_other_s_loss_too(
    bench: Bench, undisturbed: dict[int, float]
) -> None:
    started = bench.nodes(2, *HELD)
    wait_for_iteration(bench, 0, 5)
    bench.kill(3, 4)

    def fewer() -> bool:
        return any(plan["members"] == [[0, 2]] for plan in bench.events("plan"))

    eventually(fewer, "the run goes on without worker 3")  # worker 2 may have been at any iteration before
    kill_nodes(started[0])
    bench.go()
    assert started[1].wait() == 0, started[1].err
    assert losses(bench, 2) == pytest.approx(undisturbed, rel=1e-10)
    assert holders(bench) == [[[2, 2]]]


def start(bench: Bench, leases: list[object]) -> list[Launch]:
    options = ["--nnodes", 2, "--nproc-per-node", 2, "--master-port", free_port(), "--log-dir", "logs"]
    return [
        bench.start(*options, "--node-rank", node, "--lease", lease, *HELD, environment=SECRET)
        for node, lease in enumerate(leases)
    ]


@pytest.mark.slow
@pytest_group
def test_without_a_lease_the_rest_stops(bench: Bench) -> None:
    started = start(bench, ["off", "off"])
    wait_for_iteration(bench, 2, 5)
    kill_nodes(started[0])
    bench.go()
    assert started[1].wait() == 11, started[1].err


@pytest.mark.slow
@pytest_group
def test_a_lease_that_was_asked_for_and_cannot_be_had_ends_the_launch(bench: Bench) -> None:
    for folder in ("here", "there"):
        (bench.folder / folder).mkdir()
    started = start(bench, ["here/lease", "there/lease"])
    assert [launch.wait() for launch in started] == [2, 2], [launch.err for launch in started]
    assert "here/lease cannot be used: node 1: " in started[0].err
