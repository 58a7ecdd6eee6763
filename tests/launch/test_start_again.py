"""Workers die before the training has begun: with --max-restarts or spares the launch starts again, at once."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest

from recover_megatron.launch.nodes import guest
from recover_megatron.launch.workers.states import LEFT_OUT
from recover_megatron.membership.records import EXIT_NO_REPLICA
from recover_megatron.run_log.steps import audit_problem, read_steps
from tests.drawn import some
from tests.harness.forkserver import ForkServer
from tests.harness.patience import patient
from tests.harness.waiting import eventually, written_lines
from tests.megatron_hooks import tiny
from tests.megatron_hooks.tiny import MOCK, MODEL, NO_DROPOUT, OURS, SCHEDULE

from .conftest import SECRET, UNTIL_TOLD, Bench, Launch
from .pretrain_struck import POINTS

pytestmark = pytest.mark.slow
PATIENCE = patient(300)
"""Seconds for a training: a loaded machine imports torch for minutes."""

STRUCK = Path(__file__).with_name("pretrain_struck.py")
DIES = """
    import os, signal, sys, time
    from pathlib import Path

    rank, times = os.environ["RECOVER_WORKER_ID"], int(sys.argv[1])  # a spare has the rank of another one
    with Path(f"first-{rank}").open("a") as file:
        file.write(os.environ.get("RECOVER_FIRST_START", "none") + "\\n")
    ups = Path(f"ups-{rank}")
    with ups.open("a") as file:
        file.write(f"{os.getpid()}\\n")
    tries = len(ups.read_text().split())
    print("UP", rank, flush=True)
    if rank in sys.argv[2].split(",") and tries <= times:
        all_ups = [Path(f"ups-{r}") for r in range(int(os.environ["WORLD_SIZE"]))]
        while not all(other.exists() and len(other.read_text().split()) >= tries for other in all_ups):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    if tries <= times:
        time.sleep(1000)
    """


def ups(bench: Bench, rank: int) -> list[str]:
    return written_lines(bench.folder / f"ups-{rank}")


@pytest.mark.parametrize("again", [["--max-restarts", 2], []])
@pytest.mark.parametrize("victims", some("start again", ["1", "0,2"], 1))
def test_a_launch_whose_workers_are_killed_starts_again_as_often_as_it_may(
    bench: Bench, victims: str, again: list[object]
) -> None:
    spares = [] if again else ["--recover-spares", 1]
    argv = [*again, "--nproc-per-node", 3, "--log-dir", "logs", bench.script(DIES), 1, victims, "--recover", *spares]
    launch = bench.run(*argv)
    most = 2 if again else 1
    said = [line for line in launch.err.splitlines() if "the launch starts again" in line]
    assert len(said) == 1
    assert f"the training has not begun and needs all workers: the launch starts again (1 of at most {most})" in said[0]
    pids = {pid for rank in range(3) for pid in ups(bench, rank)}
    assert len(pids) == 6


def test_the_last_start_that_fails_ends_the_launch_with_a_code_that_is_requeued(bench: Bench) -> None:
    began, nested = time.time(), {"RECOVER_FIRST_START": "1.0"}
    argv = ["--max-restarts", 2, "--nproc-per-node", 2, bench.script(DIES), 1000, "1", "--recover"]
    launch = bench.run(*argv, environment=nested, ends=10)
    assert launch.err.count("the launch starts again") == 2
    assert launch.err.count("the launch ends with exit code 10") == 1
    assert len(ups(bench, 1)) == 3
    told = [written_lines(bench.folder / f"first-{rank}") for rank in range(2)]
    assert told[0] == told[1] == ["none", told[0][1], told[0][1]], "when the first of the three was made"
    assert began <= float(told[0][1]) <= (bench.folder / "first-1").stat().st_mtime


def test_a_fault_of_the_work_is_not_tried_again(bench: Bench) -> None:
    script = bench.script("raise ValueError('no such token')")
    launch = bench.run("--max-restarts", 2, "--nproc-per-node", 2, script, "--recover", ends=1)
    assert "the launch starts again" not in launch.err
    assert "in its place" not in launch.err


def test_a_signal_ends_a_launch_that_is_about_to_start_again(bench: Bench) -> None:
    script = bench.script(DIES)
    launch = bench.start("--max-restarts", 100_000, "--nproc-per-node", 2, script, 100_000, "0", "--recover")
    launch.wait_for("the launch starts again", times=2)
    launch.send(signal.SIGTERM)
    assert launch.wait() in (143, -signal.SIGTERM)
    assert launch.left() == []


@pytest.mark.xdist_group("several nodes")
@pytest.mark.parametrize("victims", some("start again nodes", ["0", "3", "1,2"], 1))
def test_all_launchers_of_a_launch_start_again_together(bench: Bench, victims: str) -> None:
    for launch in bench.nodes(2, "--max-restarts", 2, bench.script(DIES), 2, victims, "--recover"):
        launch.ends()
    assert [len(ups(bench, rank)) for rank in range(4)] == [3] * 4


@pytest.mark.xdist_group("several nodes")
@pytest.mark.parametrize("victim", some("launcher at the start", [0, 1], 1))
def test_without_a_launcher_the_start_is_not_made_again(bench: Bench, victim: int) -> None:
    started = bench.nodes(2, "--max-restarts", 2, bench.script(DIES), 1, "none", "--recover")
    eventually(lambda: all((bench.folder / f"ups-{rank}").exists() for rank in range(4)), "all are up")
    os.kill(started[victim].pid, signal.SIGKILL)
    other = started[1 - victim]
    assert other.wait() == 10, other.err
    assert "the launch starts again" not in other.err


@pytest.mark.xdist_group("several nodes")
def test_two_nodes_that_are_lost_are_left_out_and_a_launcher_of_theirs_that_comes_back_is_told(bench: Bench) -> None:
    script = bench.script(UNTIL_TOLD)
    started = bench.nodes(4, script, "--recover", "--recover-spares", 3, per_node=1)
    for launch in started:
        launch.wait_for("UP")
    for lost in started[1:3]:
        lost.send(signal.SIGKILL)
    left = started[0], started[3]
    for launch in left:
        launch.wait_for(", spares of node 3 as workers 1-2, store")
    back = bench.start(*started[1].process.args[3:], environment=SECRET)
    assert back.wait() == LEFT_OUT
    assert "node 1 was lost at the start of the run, which started again without it: the run continues" in back.err
    assert "recover-run --join --recover-coordinator 127.0.0.1:" in back.err
    bench.go()
    for launch in left:
        launch.ends()
    assert {entry["worker_id"]: entry["node_rank"] for entry in bench.workers()} == {0: 0, 1: 3, 2: 3, 3: 3, 4: 3}


def trained(bench: Bench, runs: list[Launch]) -> dict[int, float]:
    for launch in runs:
        launch.process.wait(PATIENCE)
    assert [launch.wait() for launch in runs] == [0] * len(runs), [launch.err[-3000:] for launch in runs]
    steps = list(read_steps(bench.folder / "logs" / "steps.jsonl"))
    assert [audit_problem(step) for step in steps] == [None] * len(steps)
    return {step.iteration: step.loss for step in steps}


def training(folder: Path) -> list[str]:
    load = ["--load", str(folder / "none")]
    return [*MODEL, *SCHEDULE, *MOCK, *NO_DROPOUT, "--train-iters", "6", "--recover", *load]


@pytest.fixture(scope="module")
def undisturbed(forkserver: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    folder = tmp_path_factory.mktemp("undisturbed")
    losses = {step.iteration: step.loss for step in tiny.undisturbed(forkserver, 2, [OURS, *training(folder)], folder)}
    assert sorted(losses) == list(range(1, 7))
    return losses


CELLS = [(point, victims, several) for point in POINTS for victims in ("0", "1", "0,1") for several in (False, True)]


@pytest.mark.xdist_group("several nodes")
@pytest.mark.parametrize(("point", "victims", "several"), some("struck at the start", CELLS, 1))
def test_a_training_whose_workers_died_at_the_start_is_the_undisturbed_one(
    bench: Bench, undisturbed: dict[int, float], point: str, victims: str, several: bool
) -> None:
    """Of two workers, on one node or two."""
    argv = [STRUCK, *training(bench.folder)]
    struck = {"STRUCK_AT": point, "STRUCK_RANKS": victims, "STRUCK_FOLDER": str(bench.folder)}
    if several:
        runs = bench.nodes(2, "--max-restarts", 2, *argv, per_node=1, environment={**SECRET, **struck})
    else:
        options = ["--nproc-per-node", 2, "--max-restarts", 2, "--log-dir", "logs"]
        runs = [bench.start(*options, *argv, environment=struck)]
    assert trained(bench, runs) == undisturbed
    assert "the launch starts again" in "".join(launch.err for launch in runs)
    assert (bench.folder / f"struck-{victims[0]}").exists()


@pytest.mark.xdist_group("several nodes")
@pytest.mark.parametrize("point", some("node struck at the start", list(POINTS), 1))
def test_a_training_that_lost_a_node_at_the_start_is_the_undisturbed_one(
    bench: Bench, forkserver: ForkServer, tmp_path: Path, point: str
) -> None:
    """Of three nodes with a worker each, and a spare on the last one."""
    argv = [*training(bench.folder), "--global-batch-size", "12"]
    alone = tmp_path / "undisturbed"
    losses = {step.iteration: step.loss for step in tiny.undisturbed(forkserver, 3, [OURS, *argv], alone)}
    struck = {"STRUCK_AT": point, "STRUCK_RANKS": "1", "STRUCK_NODES": "1", "STRUCK_FOLDER": str(bench.folder)}
    options = [STRUCK, *argv, "--recover-spares", "1"]
    first, lost, last = bench.nodes(3, *options, per_node=1, environment={**SECRET, **struck})
    assert trained(bench, [first, last]) == losses
    assert lost.wait() == -signal.SIGKILL
    said = [line for line in first.err.splitlines() if "the launch starts again" in line]
    assert len(said) == 1
    assert "node 1 (its launcher has ended) is lost; the training has not begun" in said[0]
    assert said[0].endswith("(1 of at most 1) without node 1, spares of node 2 as workers 1")
    assert {entry["worker_id"]: entry["node_rank"] for entry in bench.workers()} == {0: 0, 1: 2, 2: 2}


def test_a_node_whose_node_0_does_not_make_the_start_again_waits_no_longer_than_for_the_others(monkeypatch) -> None:
    told: list[tuple] = []
    plan = SimpleNamespace(
        attempt=1, rendezvous_timeout=0.5, master_addr="127.0.0.1", master_port=1, node_rank=1, host="b"
    )
    monkeypatch.setattr(guest, "join_store", lambda *_: object())
    monkeypatch.setattr(guest.Guest, "_look", lambda *_: {"attempt": 0})  # the store of the start before stays up
    events = SimpleNamespace(failed="failed")
    thread = Thread(target=guest.Guest(plan, None, events, lambda *words: told.append(words)).run, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    ((event, reason, code),) = told
    assert (event, code) == ("failed", EXIT_NO_REPLICA)
    assert "has not started again within 0.5 s" in reason
