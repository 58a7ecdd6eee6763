"""The witness of a launch: found out at the start, and asked when fewer than half of the workers are left."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from recover_megatron.launch import leasing
from recover_megatron.membership.testimony import KUBERNETES, SLURM, NoAnswer, Scope
from tests.harness.processes import free_port

from .conftest import SECRET, Bench, Launch, plan_of
from .test_several_nodes import HELD, ITERATIONS, kill_nodes, losses, wait_for_iteration

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
        ("kubernetes", IN_SLURM, {"reason": "this is no node of Kubernetes' API server"}),
    ],
)
def test_a_node_tells_what_the_witness_calls_it(
    answers: type[Answer], kind: str, environ: dict[str, str], told: dict[str, str]
) -> None:
    plan = plan_of(node_rank=1, nnodes=3, witness=kind)
    assert leasing.look_for_witness(plan, environ) == {"node": "h-1", **told}


@pytest.mark.parametrize("found", [{}, {"n1": True}, NoAnswer("it hangs")])
def test_a_witness_that_does_not_know_that_a_node_with_a_candidate_runs_is_none(
    answers: type[Answer], found: Mapping[str, bool] | NoAnswer
) -> None:
    answers.found = found
    first, last = (plan_of(nnodes=10, node_rank=node, witness="auto") for node in (1, 9))
    assert "SLURM's controller" in leasing.look_for_witness(first, IN_SLURM)["reason"]
    assert "reason" not in leasing.look_for_witness(last, IN_SLURM), "it has no candidate, and does not ask"


def told(*kinds: str) -> dict[int, dict[str, str]]:
    return {rank: {"node": f"host-{rank}", "kind": kind, "place": f"n{rank}"} for rank, kind in enumerate(kinds)}


def test_all_nodes_have_the_same_witness_and_the_candidates_are_given_all_names() -> None:
    scope, line = leasing.agree_on_witness(plan_of(), told(SLURM, SLURM), lease=True)
    assert scope == Scope(SLURM, {"host-0": "n0", "host-1": "n1"})
    assert "SLURM's controller is asked" in line


@pytest.mark.parametrize(
    ("words", "lease", "line"),
    [
        ({0: {"node": "host-0"}, 1: {"node": "host-1"}}, True, ""),
        ({0: {}, 1: None}, True, ""),
        (told(SLURM, SLURM), False, "it needs a lease"),
        (told(SLURM, KUBERNETES), True, "not all nodes"),
        ({**told(SLURM), 1: {"node": "host-1"}}, True, "not all nodes"),
        ({**told(SLURM), 1: {"node": "host-1", "reason": "it hangs"}}, True, "(node 1: it hangs)"),
        ({0: told(SLURM)[0], 1: told(SLURM)[0]}, True, "no names of their own"),
        (told("other", "other"), True, "no names of their own"),
    ],
)
def test_else_there_is_none_and_a_line_says_why(words: dict[int, dict[str, str]], lease: bool, line: str) -> None:
    scope, said = leasing.agree_on_witness(plan_of(), words, lease)
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
def start(bench: Bench) -> Callable[..., list[Launch]]:
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


several_nodes = pytest.mark.xdist_group("several nodes")


@pytest.mark.slow
@several_nodes
def test_one_node_of_three_goes_on_when_slurm_says_that_the_others_are_powered_off(
    bench: Bench, start: Callable[..., list[Launch]]
) -> None:
    started = start()
    wait_for_iteration(bench, 4, 10)
    for name in ("n0", "n1"):
        (bench.folder / "states" / name).write_text("DOWN*+POWERED_DOWN")
    kill_nodes(*started[:2])
    bench.go()
    assert started[2].wait() == 0, started[2].err
    assert sorted(losses(bench, 4)) == list(range(1, ITERATIONS + 1))
    assert "SLURM's controller is asked then" in started[0].err
    assert "witness: SLURM says of n0, n1: powered off" in started[2].err
    holders = [json.loads(path.read_text())["members"] for path in (bench.folder / "logs").glob("lease-*.[0-9]*")]
    assert [[4, 5]] in holders


@pytest.mark.slow
@several_nodes
def test_it_ends_when_slurm_says_that_the_others_are_down(bench: Bench, start: Callable[..., list[Launch]]) -> None:
    """They may be running, behind a cut cable."""
    started = start()
    wait_for_iteration(bench, 4, 10)
    for name in ("n0", "n1"):
        (bench.folder / "states" / name).write_text("DOWN*")
    kill_nodes(*started[:2])
    bench.go()
    assert started[2].wait() == 11, started[2].err


@pytest.mark.slow
@several_nodes
def test_a_witness_that_was_asked_for_and_does_not_answer_ends_the_launch(
    bench: Bench, start: Callable[..., list[Launch]]
) -> None:
    (bench.folder / "bin" / "scontrol").write_text("#!/bin/sh\necho no controller >&2; exit 1\n")
    started = start("--witness", "slurm")
    assert [launch.wait() for launch in started] == [2, 2, 2], [launch.err for launch in started]
    assert "--witness slurm cannot be used: no witness (node 0: SLURM's controller:" in started[0].err
