"""What is read out of SLURM's environment, and by a pod of Kubernetes out of what others have said."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from recover_megatron.launch import messages, slurm
from recover_megatron.launch.command_line.arguments import parse
from recover_megatron.launch.command_line.spec import LaunchSpec
from recover_megatron.launch.slurm import address_of, left_alone, places_of
from tests.harness import REPOSITORY

from .conftest import SECRET, spec_of

TASK = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_NODELIST": "n[1-4]",
    "SLURM_STEP_NODELIST": "n[2-4]",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_TASKS": "3",
}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-3,7]", ["n1", "n2", "n3", "n7"]),
        ("n[1-3,7],gpu-a[01-04]", ["n1", "n2", "n3", "n7", "gpu-a01", "gpu-a02", "gpu-a03", "gpu-a04"]),
        ("gpu-a[08-11]", ["gpu-a08", "gpu-a09", "gpu-a10", "gpu-a11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("login,node-3.example.org", ["login", "node-3.example.org"]),
        ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"]),
        ("a[3,1]-ib", ["a3-ib", "a1-ib"]),
    ],
)
def test_a_node_list_is_expanded_in_its_order(text: str, names: list[str]) -> None:
    assert slurm.expand(text) == names


@pytest.mark.parametrize(
    "text",
    ["", "n[1-3", "n1-3]", "n[]", "n[a-b]", "n[3-1]", "n[1-]", ",n1", "n1,", "n1,,n2", "n 1", "n[1-99999999999]"],
)
def test_what_is_no_node_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="node list"):
        slurm.expand(text)


PREFIXES = st.from_regex(r"[a-z][a-z0-9.-]{0,5}[a-z-]", fullmatch=True)


@st.composite
def groups(draw: st.DrawFn) -> str:
    """A piece of a node list, as SLURM writes it."""
    width, parts = draw(st.integers(1, 4)), []
    for first, more in draw(st.lists(st.tuples(st.integers(0, 500), st.integers(0, 11)), min_size=1, max_size=4)):
        parts.append(f"{first:0{width}}-{first + more:0{width}}" if more else f"{first:0{width}}")
    return f"{draw(PREFIXES)}[{','.join(parts)}]"


@pytest.fixture(scope="module")
def with_slurm(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of scontrol, which reads a configuration even to expand a list."""
    if not shutil.which("scontrol"):
        pytest.skip("SLURM is not installed here: apt-get install slurm-wlm")
    path = tmp_path_factory.mktemp("slurm") / "slurm.conf"
    path.write_text("ClusterName=a\nSlurmctldHost=localhost\nNodeName=n1\nPartitionName=all Nodes=ALL\n")
    return os.environ | {"SLURM_CONF": str(path)}


@given(st.lists(st.one_of(groups(), PREFIXES), min_size=1, max_size=5))
@example(["n[098-101]", "r[1-2]n[08-10]", "n"])
def test_a_node_list_means_what_scontrol_says(with_slurm: dict[str, str], parts: list[str]) -> None:
    command = ["scontrol", "show", "hostnames", ",".join(parts)]
    shown = subprocess.run(command, env=with_slurm, capture_output=True, text=True, check=True)
    assert slurm.expand(command[-1]) == shown.stdout.split()


@given(st.text(alphabet="n1-[],09 x", max_size=20))
def test_no_text_does_more_than_raise_a_value_error(text: str) -> None:
    try:
        assert slurm.expand(text)
    except ValueError as error:
        assert repr(text) in str(error)  # noqa: PT017 - which error, for which text


@given(st.integers(1, 10**8), st.integers(0, 50))
def test_ports_are_those_of_users_and_not_the_kernels(job: int, step: int) -> None:
    found = slurm.ports(job, step)
    assert len(set(found)) == slurm.PORTS_OF_A_STEP
    assert all(1024 < port < 32768 for port in found)


@given(st.integers(1, 10**8), st.integers(0, 20))
def test_neighbouring_jobs_and_steps_have_different_ports(job: int, step: int) -> None:
    steps = [(job, step), (job, step + 1), (job + 1, step), (job + 1, step + 1)]
    found = [port for number, part in steps for port in slurm.ports(number, part)]
    assert len(set(found)) == len(found)


def test_a_task_knows_its_step() -> None:
    step = slurm.step_of(TASK)
    assert step == slurm.SlurmStep(4711, 0, ("n2", "n3", "n4"), 1, 0, 3)
    assert step.one_task_a_node
    assert step.store_port == slurm.ports(4711, 0)[0]


def test_a_second_task_of_a_node_is_seen() -> None:
    step = slurm.step_of(TASK | {"SLURM_STEP_NUM_TASKS": "6", "SLURM_LOCALID": "1", "SLURM_GPUS_ON_NODE": "2"})
    assert step is not None
    assert not step.one_task_a_node
    assert step.gpus == 2


@pytest.mark.parametrize("missing", ["SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NODEID"])
def test_outside_of_a_step_there_is_none(missing: str) -> None:
    assert slurm.step_of({name: value for name, value in TASK.items() if name != missing}) is None


def test_values_that_slurm_does_not_set_are_refused() -> None:
    with pytest.raises(ValueError, match="SLURM_NODEID is 3, but the step's node list"):
        slurm.step_of(TASK | {"SLURM_NODEID": "3"})
    with pytest.raises(ValueError, match="SLURM_JOB_ID"):
        slurm.step_of(TASK | {"SLURM_JOB_ID": "x"})


def test_the_network_is_asked_for_an_address_before_slurm_is() -> None:
    asked: list[str] = []
    assert address_of("n1", lambda name: True, lambda name: asked.append(name) or "") == "n1"
    assert asked == []
    told = "NodeName=n1 Arch=x86_64 NodeAddr=10.1.2.3 NodeHostName=vm Version=22.05.8"
    assert address_of("n1", lambda name: False, lambda name: told) == "10.1.2.3"


@pytest.mark.parametrize("told", ["", "NodeName=n1 NodeAddr=(null)", "Node n1 not found"])
def test_a_node_that_nobody_knows_is_named(told: str) -> None:
    with pytest.raises(ValueError, match=r"node n1 .* --master-addr"):
        address_of("n1", lambda name: False, lambda name: told)


GPUS = {"SLURM_GPUS_ON_NODE": "8"}
ALONE = {"SLURM_STEP_NODELIST": "n4", "SLURM_NODEID": "0", "SLURM_STEP_NUM_TASKS": "1"}
PORT = slurm.ports(4711, 0)[0]


@pytest.mark.parametrize(
    ("given", "more", "shape"),
    [
        pytest.param("--master-addr 10.0.0.1", {}, (3, 1, "10.0.0.1", PORT, 1), id="that of the step"),
        pytest.param("--master-addr 10.0.0.1", GPUS, (3, 1, "10.0.0.1", PORT, 8), id="a worker for each GPU"),
        pytest.param(
            "--master-addr a --master-port 4000 --nproc-per-node 2", GPUS, (3, 1, "a", 4000, 2),
            id="the command line wins where nodes may differ",
        ),
        pytest.param("", ALONE, (1, 0, "127.0.0.1", 0, 1), id="a step of one node is a launch of one node"),
    ],
)  # fmt: skip
def test_a_launch_takes_its_shape_from_the_step(given: str, more: dict[str, str], shape: tuple[object, ...]) -> None:
    options, reasons = parse(["--slurm", *given.split(), __file__], TASK | more)
    assert reasons == []
    found = (options.nnodes, options.node_rank, options.master_addr, options.master_port, options.nproc_per_node)
    assert found == shape


def test_slurms_shape_and_another_one_are_refused_together() -> None:
    _, reasons = parse(["--slurm", "--nnodes", "2", "--node-rank", "0", "--join", __file__], TASK)
    assert len([reason for reason in reasons if "with --slurm, SLURM defines it" in reason]) == 2
    assert any(reason.startswith("--slurm is for the launch") for reason in reasons)


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        ({}, "start one recover-run per node with srun"),
        (TASK | {"SLURM_STEP_NUM_TASKS": "6"}, "the step has 6 tasks on 3 nodes"),
        (TASK | {"SLURM_STEP_NODELIST": "n["}, "'n\\[' is not a SLURM node list"),
    ],
)
def test_a_process_that_is_no_launchers_task_is_refused(environ: dict[str, str], reason: str) -> None:
    _, reasons = parse(["--slurm", __file__], environ)
    assert len(reasons) == 1
    assert re.search(reason, reasons[0])


def test_a_launcher_that_is_left_alone_among_several_is_told() -> None:
    assert "node 1 of 3 of a SLURM step" in left_alone(TASK)
    assert left_alone({}) == ""
    assert left_alone(TASK | {"SLURM_STEP_NUM_TASKS": "24"}) == ""


@pytest.mark.parametrize(
    ("nodes", "slurm", "hosts"),
    [(1, 0, (0,)), (2, 0, (0, 1)), (5, 0, (0, 1, 2)), (2, 1, (1, 0)), (3, 1, (1, 2, 0)), (9, 1, (1, 2, 3))],
)
def test_under_slurm_the_coordinator_that_leads_is_not_beside_the_batch_script(
    nodes: int, slurm: int, hosts: tuple[int, ...]
) -> None:
    assert LaunchSpec(nnodes=nodes, slurm=slurm).candidate_nodes == hosts


@pytest.mark.parametrize(
    ("nodes", "relative", "hosts", "first"),
    [("n1", 0, ["n1"], "n1"), ("n[1-2]", 0, ["n1", "n2"], "n2"), ("n[1-3]", 0, ["n1", "n2", "n3"], "n2"),
     ("n[1-9]", 1, ["n2", "n3", "n4"], "n2")],
)  # fmt: skip
def test_coordinators_of_a_step_of_their_own_are_where_the_workers_look_for_them(
    nodes: str, relative: int, hosts: list[str], first: str
) -> None:
    places = places_of({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": nodes}, lambda name: f"{name}.local")
    assert (places.master_addr, places.master_port) == ("n1.local", slurm.ports(7, 0)[0])
    assert places.relative == relative
    assert [place.split(".")[0] for place in places.listen] == hosts
    assert sorted(places.coordinators) == sorted(places.listen)
    assert places.coordinators[0].startswith(f"{first}.local:")
    assert len({place.rpartition(":")[2] for place in places.listen} | {str(places.master_port)}) == len(hosts) + 1


def test_outside_of_a_job_there_are_no_places() -> None:
    with pytest.raises(ValueError, match="not in a SLURM job"):
        places_of({})


def pod(folder: Path, *answers: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run the pod of node 1 beside a folder that tells of a run; ``answers``: those of recover-status, in order."""
    commands, logs = folder / "bin", folder / "run"
    commands.mkdir(exist_ok=True)
    logs.mkdir(exist_ok=True)
    for name, what in {
        "recover-run": 'echo "$@"',
        "recover-status": '[ "$2" = --check ] || exec echo c:8\nhead -n 1 "$1/answers"; sed -i 1d "$1/answers"',
        "sleep": "",
    }.items():
        (commands / name).write_text(f"#!/bin/sh\n{what}\n")
        (commands / name).chmod(0o755)
    (logs / "answers").write_text("".join(f"{answer}\n" for answer in answers))
    values = {"JOB_COMPLETION_INDEX": "1", "POD_IP": "c", "PODS": "2", "WORKERS": "1", "MASTER": "a", **SECRET}
    environment = {"RUN_DIR": str(logs), "PATH": f"{commands}:{os.environ['PATH']}", **values, **more}
    script = REPOSITORY / "examples" / "kubernetes" / "pod.sh"
    return subprocess.run(["bash", script, "train.py"], env=environment, capture_output=True, text=True, timeout=60)


@pytest.fixture
def joinable(tmp_path: Path) -> LaunchSpec:
    """A launch whose node 0 has said in the folder how the run is joined; a host's crash has left a NUL byte there."""
    plan = spec_of(nnodes=2, nproc_per_node=1)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "launcher-0.log").write_text(f"recover-run: {messages.how_to_join(plan, 'c:7')}\n\0")
    return plan


def test_a_pod_takes_the_command_by_which_it_joins_from_no_launcher_that_was_left_out(
    tmp_path: Path, joinable: LaunchSpec
) -> None:
    logs = tmp_path / "run"
    (logs / "launcher-1.log").write_text(f"recover-run: {messages.continues_without(joinable, 'lost', '$(a b)')}\n")
    joined = pod(tmp_path, "HEALTHY")
    address = f"--master-addr {joinable.master_addr} --master-port {joinable.master_port}"
    its = f"--join --recover-coordinator c:8 --world-size 2 {address} --nproc-per-node 1 --log-dir {logs} train.py"
    assert joined.stdout == its + "\n", joined.stderr


@pytest.mark.parametrize(
    ("answers", "first"), [(["UNKNOWN: no coordinator answers", "", "HEALTHY 2/2"], "--join"), (["ENDED"], "--nnodes")]
)
def test_a_pod_launches_the_run_anew_only_where_it_knows_that_the_last_one_is_over(
    tmp_path: Path, joinable: LaunchSpec, answers: list[str], first: str
) -> None:
    """An answer that does not tell the state of the run does not mean that the run has ended."""
    assert pod(tmp_path, *answers).stdout.split()[0] == first


def test_a_pod_that_is_made_again_after_the_training_ends_instead_of_waiting_for_the_others(tmp_path: Path) -> None:
    """Their places in the Job are done.  Another Job goes on from the checkpoints in the folder."""
    logs, listens = tmp_path / "run", '\0\n{"event":"listening","address":"a:1"}\n'
    events, said = logs / "events-0.jsonl", logs / "launcher-1.log"

    def launches(job: str, code: int = 0) -> bool:
        done = pod(tmp_path, "HEALTHY", JOB_UID=job)
        assert done.returncode == code, done.stderr
        return done.stdout.startswith("--nnodes 2 --node-rank 1 ")

    def ends_with(code: int) -> None:
        os.utime(logs / "job-1", (0, 0))  # two files that are written at once may have the same time
        events.write_text(f'{listens}{{"time":1.5,"event":"stop","code":{code},"reason":"as it is"}}\n')

    assert launches("first")
    ends_with(10)
    assert launches("first"), "it goes on from the last checkpoint"
    ends_with(0)
    assert not launches("first")
    alone = pod(tmp_path, JOB_UID="first", PODS="1").stdout
    assert alone.startswith("--nnodes 1 "), "it need not wait for others"
    said.write_text("the training was finished, but the script failed afterwards: see the logs of the workers")
    assert not launches("first", code=1)
    assert launches("second")
    assert launches("second"), "that was the end of another Job's run"
    ends_with(0)
    with events.open("a") as log:
        log.write(listens)
    assert launches("second"), "the run of this Job has begun after that end"
