"""The rendezvous store: served by the launcher of node 0, there for plain torch scripts, on one node and on several.

It is open to everybody on the network: what a stranger writes there is not believed.
"""

import json
import os
import signal
from pathlib import Path

import pytest

from recover_megatron.launch.store import Seal, Unproved
from recover_megatron.membership.wire import Secret
from tests.harness.processes import closed_port, free_port, processes_with
from tests.harness.waiting import eventually

from .conftest import SECRET, Bench

ALL_REDUCE = """
    import os
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    told = [os.environ[name] for name in ("GLOO_SOCKET_IFNAME", "TORCHELASTIC_RUN_ID")]
    print("TOTAL", dist.get_rank(), dist.get_world_size(), total.item(), *told, flush=True)
    dist.barrier()
    dist.destroy_process_group()  # else torch may abort at exit, when gloo's threads are still there
    """

UNTIL_TOLD = """
    import os, time
    print("UP", os.environ["RANK"], os.environ["GROUP_RANK"], os.environ["LOCAL_RANK"])
    while not os.path.exists("go" + os.environ["RANK"]):
        time.sleep(0.05)
    """


def owners_of_listener(port):
    """Processes that hold the socket listening on 127.0.0.1:``port``."""
    address = f"0100007F:{port:04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    inodes = {f"socket:[{row[9]}]" for row in rows if row[1] == address and row[3] == "0A"}
    owners = set()
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                links = {os.readlink(f"/proc/{name}/fd/{fd}") for fd in os.listdir(f"/proc/{name}/fd")}
            except OSError:
                continue
            if links & inodes:
                owners.add(int(name))
    return owners


@pytest.mark.slow
def test_the_store_listens_in_the_launcher_before_and_after_it_is_served(bench):
    script = bench.script(
        """
        import os, time
        print("PORT", os.environ["MASTER_PORT"])
        from torch.distributed import TCPStore
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        store.set("some", "thing")
        print("SERVED", store.get("some"))
        while not os.path.exists("go"):
            time.sleep(0.05)
        """
    )
    launch = bench.start(script)
    launch.wait_for("PORT")
    port = int(launch.out.split("PORT ")[1].split()[0])
    assert owners_of_listener(port) == {launch.pid}
    launch.wait_for("SERVED b'thing'")
    assert owners_of_listener(port) == {launch.pid}
    (bench.folder / "go").touch()
    assert launch.wait() == 0


@pytest.mark.slow
def test_a_plain_torch_script_runs_unmodified(bench):
    launch = bench.run("--nproc-per-node", 2, bench.script(ALL_REDUCE))
    assert "[0] TOTAL 0 2 3.0" in launch.out
    assert "[1] TOTAL 1 2 3.0" in launch.out


@pytest.mark.slow
def test_two_launchers_on_one_machine_make_one_job(bench):
    first, second = bench.nodes(2, bench.script(ALL_REDUCE), per_node=1, environment={})
    assert (first.wait(), second.wait()) == (0, 0), first.err + second.err
    (total_0,) = [line for line in first.out.splitlines() if "TOTAL" in line]
    (total_1,) = [line for line in second.out.splitlines() if "TOTAL" in line]
    assert total_0.startswith("[0] TOTAL 0 2 3.0")
    assert total_1.startswith("[1] TOTAL 1 2 3.0")
    assert total_0.split()[-1] == total_1.split()[-1]  # one run id
    workers = bench.workers()
    assert [(worker["worker_id"], worker["node_rank"], worker["state"]) for worker in workers] == [
        (0, 0, "finished"),
        (1, 1, "finished"),
    ]


@pytest.mark.slow
def test_ranks_of_several_nodes_and_the_store_stays_for_the_last(bench):
    """Node 0's workers end first; its launcher waits for the other node, and judges all workers."""
    first, second = bench.nodes(2, bench.script(UNTIL_TOLD), environment={})
    first.wait_for("UP", times=2)
    second.wait_for("UP", times=2)
    assert "[2] UP 2 1 0" in second.out
    assert "[3] UP 3 1 1" in second.out
    for rank in (0, 1):
        (bench.folder / f"go{rank}").touch()
    first.wait_for("the store stays up until node 1 has ended")
    assert first.process.poll() is None
    (bench.folder / "go2").touch()
    second.wait_for("UP 3")
    (pid,) = set(second.left()) & set(processes_with("RANK=3"))
    os.kill(pid, signal.SIGKILL)
    assert second.wait() == 137
    assert first.wait() == 137


@pytest.mark.slow
def test_a_second_launcher_with_the_same_node_rank_is_refused_and_the_first_goes_on(bench):
    script = bench.script(UNTIL_TOLD)
    nodes = ["--nnodes", 2, "--master-port", free_port()]
    first = bench.start(*nodes, "--node-rank", 0, script)
    second = bench.start(*nodes, "--node-rank", 1, script)
    second.wait_for("UP 1")
    third = bench.run(*nodes, "--node-rank", 1, script, ends=2)
    assert "node rank 1 has been taken by another launcher" in third.err
    assert "Traceback" not in third.err
    assert "UP" not in third.out
    for rank in (0, 1):
        (bench.folder / f"go{rank}").touch()
    assert (first.wait(), second.wait()) == (0, 0)


@pytest.mark.slow
def test_launchers_that_disagree_end_with_the_reason_on_both_sides(bench):
    script = bench.script(UNTIL_TOLD)
    port = free_port()
    first = bench.start("--nnodes", 2, "--nproc-per-node", 1, "--master-port", port, "--node-rank", 0, script)
    second = bench.run("--nnodes", 2, "--nproc-per-node", 3, "--master-port", port, "--node-rank", 1, script, ends=2)
    assert "--nproc-per-node is 3 here (node 1) but 1 on node 0" in second.err
    assert "UP" not in second.out
    assert first.wait() == 1
    assert "--nproc-per-node is 3 here (node 1) but 1 on node 0" in first.err
    assert first.left() == []


def test_a_node_whose_node_0_never_appears_gives_up(bench):
    script = bench.script(UNTIL_TOLD)
    with closed_port() as port:
        launch = bench.run(
            "--nnodes", 2, "--node-rank", 1, "--master-port", port, "--rendezvous-timeout", 0.5, script, ends=1
        )
    assert "node 0 did not answer" in launch.err
    assert "Traceback" not in launch.err
    assert "UP" not in launch.out


@pytest.mark.slow
def test_node_0_gives_up_when_a_node_never_appears(bench):
    script = bench.script(UNTIL_TOLD)
    launch = bench.run("--nnodes", 3, "--master-port", free_port(), "--rendezvous-timeout", 1, script, ends=1)
    assert "node 1, 2 of 3 did not appear within 1 s" in launch.err


@pytest.mark.slow
def test_node_0_does_not_wait_for_ever_for_a_node_whose_launcher_was_killed(bench):
    first, second = bench.nodes(2, bench.script(UNTIL_TOLD), per_node=1)
    second.wait_for("UP 1")
    second.send(signal.SIGKILL)
    second.wait()
    (bench.folder / "go0").touch()
    first.wait_for("node 1 is lost")
    assert first.wait() == 1


@pytest.mark.slow
def test_workers_go_on_when_the_launcher_of_node_0_is_lost(bench):
    first, second = bench.nodes(2, bench.script(UNTIL_TOLD), per_node=1, environment={})
    second.wait_for("UP 1")
    first.wait_for("all 2 nodes take part")
    first.send(signal.SIGKILL)
    second.wait_for("the store of node 0")
    eventually(lambda: first.left() == [], "node 0 is gone")
    (bench.folder / "go1").touch()
    assert second.wait() == 0


OURS, THEIRS = Seal(Secret(b"the secret of this job")), Seal(Secret(b"the secret of another job"))
END = {"reason": "because", "code": 0}


def test_a_value_is_believed_under_its_own_key_in_its_own_run_alone() -> None:
    sealed = OURS.wrap("end", "run 1", END).encode()
    assert OURS.open("end", "run 1", sealed) == END
    for key, run in (("end", "run 2"), ("coordinators", "run 1"), ("end", "")):
        with pytest.raises(Unproved):
            OURS.open(key, run, sealed)
    for forged in (THEIRS.wrap("end", "run 1", END), Seal(None).wrap("end", "run 1", END)):
        with pytest.raises(Unproved):
            OURS.open("end", "run 1", forged.encode())


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"\xff", b"null", b"[]", b"7", b'"text"', b"{}", b"[" * 100_000, b" " * (1 << 20) + b"{}"),
        b'{"text": 1, "mac": ""}',
        b'{"text": "1", "mac": "\xc3\xa9"}',
        b'{"text": "\\ud800", "mac": ""}',
    ],
)
def test_whatever_else_is_there_is_a_plain_error(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - any of it
        OURS.open("end", "run 1", data)


def test_launchers_without_a_secret_read_each_other_and_prove_nothing() -> None:
    assert not Seal(None).proves
    assert Seal(None).open("end", "any", Seal(None).wrap("end", "other", END).encode()) == END


@pytest.mark.slow
def test_a_stranger_who_writes_into_the_store_ends_nobody(bench: Bench) -> None:
    from torch.distributed import TCPStore

    port = free_port()
    nodes = ["--nnodes", 2, "--master-port", port, "--log-dir", "logs"]
    script = bench.script(UNTIL_TOLD)
    first = bench.start(*nodes, "--node-rank", 0, script, environment=SECRET)
    stranger = TCPStore("127.0.0.1", port, is_master=False)
    values = [
        "node 0 ended the launch: so it says",
        json.dumps(END),
        THEIRS.wrap("end", "", END),
        Seal(None).wrap("end", "", END),
    ]

    def write() -> None:
        for value in values:
            for key in ("end", "coordinators", "job", "welcome/1", "node/1", "everybody"):
                stranger.set("recover/launch/" + key, value)
            stranger.queue_push("recover/launch/bell", value)
            stranger.queue_push("recover/launch/bell", "1")

    write()  # before node 1 is there
    second = bench.start(*nodes, "--node-rank", 1, script, environment=SECRET)
    first.wait_for("UP 0")
    second.wait_for("UP 1")
    write()
    second.wait_for("recover/launch/end in the store is ignored")
    first.wait_for("what comes for node 1 is ignored")
    assert (first.process.poll(), second.process.poll()) == (None, None)
    for rank in (0, 1):
        (bench.folder / f"go{rank}").touch()
    assert (first.wait(), second.wait()) == (0, 0), first.err + second.err
