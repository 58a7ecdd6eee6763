"""The lease of a launch over two nodes: either of them may be lost, whole, and the run goes on; and the witness.

The witness is found out at the start, and asked when fewer than half of the workers are left.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from recover_megatron.launch.nodes import leasing
from recover_megatron.membership.io.testimony import KUBERNETES, SLURM, NoAnswer, Scope
from tests.drawn import some
from tests.harness.processes import free_port
from tests.harness.waiting import eventually

from .conftest import SECRET, Bench, Launch, spec_of
from .test_several_nodes import HELD, ITERATIONS, PLAIN, kill_nodes, losses, wait_for_iteration

FIRST = spec_of(nnodes=2, lease="auto")


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
    assert "exists already" in leasing.LeaseTrial(plan).end({})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Of one worker: the losses are those of any number of them."""
    with Bench(tmp_path_factory.mktemp("undisturbed")) as bench:
        bench.run("--log-dir", "logs", *PLAIN)
        return losses(bench, 0)


pytest_group = pytest.mark.xdist_group("several nodes")


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
    assert "the run can survive the loss of either half of the workers: the lease is at" in started[0].err
    assert bench.lease_claims() == ([[[2, 3]]] if victim == 0 else [])
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
    assert bench.lease_claims() == [[[2, 2]]]


@pytest.mark.slow
@pytest_group
def test_without_a_lease_the_rest_stops(bench: Bench) -> None:
    started = bench.nodes(2, "--lease", "off", *HELD)
    wait_for_iteration(bench, 2, 5)
    kill_nodes(started[0])
    bench.go()
    assert started[1].wait() == 11, started[1].err


@pytest.mark.slow
@pytest_group
def test_a_lease_that_was_asked_for_and_cannot_be_had_ends_the_launch(bench: Bench) -> None:
    for folder in ("here", "there"):
        (bench.folder / folder).mkdir()
    options = ["--nnodes", 2, "--nproc-per-node", 2, "--master-port", free_port(), "--log-dir", "logs", "--node-rank"]
    leases = ("here/lease", "there/lease")
    started = [bench.start(*options, n, "--lease", leases[n], *HELD, environment=SECRET) for n in (0, 1)]
    assert [launch.wait() for launch in started] == [2, 2], [launch.err for launch in started]
    assert "here/lease cannot be used: node 1: " in started[0].err


IN_SLURM = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1"}
IN_A_POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "POD_NAME": "recover-1-abc", "POD_UID": "u1"}


def test_a_node_of_slurm_has_its_name_and_a_pod_its_namespace_name_and_uid(tmp_path: Path) -> None:
    (tmp_path / "namespace").write_text("training\n")
    assert leasing.place_of(SLURM, IN_SLURM) == "n1"
    assert leasing.place_of(SLURM, {"SLURMD_NODENAME": "n1"}) == ""
    assert leasing.place_of(SLURM, {"SLURM_JOB_ID": "7"}) == "", "a shell of salloc"
    assert leasing.place_of(KUBERNETES, IN_A_POD, tmp_path) == "training/recover-1-abc/u1"
    assert leasing.place_of(KUBERNETES, {**IN_A_POD, "POD_NAMESPACE": "other"}) == "other/recover-1-abc/u1"
    assert leasing.place_of(KUBERNETES, IN_A_POD, tmp_path / "none") == ""
    assert leasing.place_of(KUBERNETES, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}) == ""


class Answer:
    """A source in the place of SLURM's controller."""

    name = "SLURM"
    found: Mapping[str, bool] | NoAnswer

    def look(self, places: object) -> Mapping[str, bool]:
        if isinstance(self.found, NoAnswer):
            raise self.found
        return self.found


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> type[Answer]:
    monkeypatch.setattr(Answer, "found", {"n1": False}, raising=False)
    monkeypatch.setattr(leasing, "SOURCES", {SLURM: Answer, KUBERNETES: Answer})
    return Answer


@pytest.mark.parametrize(
    ("kind", "environ", "told"),
    [
        ("auto", IN_SLURM, {"kind": SLURM, "place": "n1"}),
        ("slurm", IN_SLURM, {"kind": SLURM, "place": "n1"}),
        ("off", IN_SLURM, {}),
        ("auto", {}, {}),
        ("kubernetes", IN_SLURM, {"reason": "no variable gives its name in Kubernetes' API server"}),
    ],
)
def test_a_node_tells_what_the_witness_calls_it(
    answers: type[Answer], kind: str, environ: dict[str, str], told: dict[str, str]
) -> None:
    plan = spec_of(node_rank=1, nnodes=3, witness=kind, environ=environ)
    assert leasing.look_for_witness(plan) == {"node": "h-1", **told}


@pytest.mark.parametrize("found", [{}, {"n1": True}, NoAnswer("it hangs")])
def test_a_witness_that_does_not_know_that_a_node_with_a_candidate_runs_is_none(
    answers: type[Answer], found: Mapping[str, bool] | NoAnswer
) -> None:
    answers.found = found
    first, last = (spec_of(nnodes=10, node_rank=node, witness="auto", environ=IN_SLURM) for node in (1, 9))
    assert "SLURM's controller" in leasing.look_for_witness(first)["reason"]
    assert "reason" not in leasing.look_for_witness(last), "it has no candidate, and does not ask"


def told(*kinds: str) -> dict[int, dict[str, str]]:
    return {rank: {"node": f"host-{rank}", "kind": kind, "place": f"n{rank}"} for rank, kind in enumerate(kinds)}


def test_all_nodes_have_the_same_witness_and_the_candidates_are_given_all_names() -> None:
    scope, line = leasing.agree_on_witness(spec_of(), told(SLURM, SLURM), lease=True)
    assert scope == Scope(SLURM, {"host-0": "n0", "host-1": "n1"})
    assert "if SLURM's controller confirms" in line


@pytest.mark.parametrize(
    ("words", "lease", "line"),
    [
        ({0: {"node": "host-0"}, 1: {"node": "host-1"}}, True, ""),
        ({0: {}, 1: None}, True, ""),
        (told(SLURM, SLURM), False, "it needs a lease"),
        (told(SLURM, KUBERNETES), True, "the nodes are not all"),
        ({**told(SLURM), 1: {"node": "host-1"}}, True, "the nodes are not all"),
        ({**told(SLURM), 1: {"node": "host-1", "reason": "it hangs"}}, True, "(node 1: it hangs)"),
        ({0: told(SLURM)[0], 1: told(SLURM)[0]}, True, "do not report different names"),
        (told("other", "other"), True, "do not report different names"),
    ],
)
def test_else_there_is_none_and_a_line_says_why(words: dict[int, dict[str, str]], lease: bool, line: str) -> None:
    scope, said = leasing.agree_on_witness(spec_of(), words, lease)
    assert scope is None
    assert line in said
    assert bool(said) == bool(line)


SCONTROL = """\
#!/bin/sh
# Stands in for SLURM's controller: a file for each node's state; without one it runs.
for name in $(echo "$4" | tr , ' '); do
    echo "NodeName=$name Arch=x86_64 State=$(cat "$STATES/$name" 2>/dev/null || echo ALLOCATED) Weight=1"
done
"""


@pytest.fixture
def start_in_slurm(bench: Bench) -> Callable[..., list[Launch]]:
    """Three launchers as three nodes of SLURM's, whose states are files in ``states``."""
    for folder in ("bin", "states"):
        (bench.folder / folder).mkdir()
    (scontrol := bench.folder / "bin" / "scontrol").write_text(SCONTROL)
    scontrol.chmod(0o755)

    def start(*more: object) -> list[Launch]:
        options = ["--nnodes", 3, "--nproc-per-node", 2, "--master-port", free_port(), "--log-dir", "logs", *more]
        shared = {**SECRET, "SLURM_JOB_ID": "7", "STATES": str(bench.folder / "states")}
        shared["PATH"] = f"{bench.folder / 'bin'}:{os.environ['PATH']}"
        return [
            bench.start(*options, "--node-rank", n, *HELD, environment={**shared, "SLURMD_NODENAME": f"n{n}"})
            for n in range(3)
        ]

    return start


@pytest.mark.slow
@pytest_group
@pytest.mark.parametrize(("state", "code"), [("DOWN*+POWERED_DOWN", 0), ("DOWN*", 11)], ids=["powered off", "down"])
def test_one_node_of_three_goes_on_only_when_slurm_says_that_the_others_are_powered_off(
    bench: Bench, start_in_slurm: Callable[..., list[Launch]], state: str, code: int
) -> None:
    """If they are only down they may be running, behind a cut cable."""
    started = start_in_slurm()
    wait_for_iteration(bench, 4, 10)
    for name in ("n0", "n1"):
        (bench.folder / "states" / name).write_text(state)
    kill_nodes(*started[:2])
    bench.go()
    assert started[2].wait() == code, started[2].err
    if code == 0:
        assert sorted(losses(bench, 4)) == list(range(1, ITERATIONS + 1))
        assert "if SLURM's controller confirms" in started[0].err
        assert "witness: SLURM reports n0, n1 as powered off" in started[2].err
        assert [[4, 5]] in bench.lease_claims()


@pytest.mark.slow
@pytest_group
def test_a_witness_that_was_asked_for_and_does_not_answer_ends_the_launch(
    bench: Bench, start_in_slurm: Callable[..., list[Launch]]
) -> None:
    (bench.folder / "bin" / "scontrol").write_text("#!/bin/sh\necho no controller >&2; exit 1\n")
    started = start_in_slurm("--witness", "slurm")
    assert [launch.wait() for launch in started] == [2, 2, 2], [launch.err for launch in started]
    assert "--witness slurm cannot be used: no witness (node 0: SLURM's controller:" in started[0].err
