"""The rendezvous store: served by the launcher of node 0, there for plain torch scripts, on one node and on several.

It is open to everybody on the network: what a stranger writes there is not believed.
"""

import json
import os
import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from recover_megatron.launch.command_line import spec
from recover_megatron.launch.nodes import guest, host, store
from recover_megatron.launch.nodes.guest import Guest
from recover_megatron.launch.nodes.host import Host, _Member
from recover_megatron.launch.nodes.store import PREFIX, Seal, Unproved
from recover_megatron.launch.workers.processes import START_AGAIN
from recover_megatron.launch.workers.states import LAUNCH_FAILED, LEFT_OUT, REFUSED
from recover_megatron.membership.records import EXIT_NO_REPLICA
from recover_megatron.membership.wire import Secret
from recover_megatron.script_flags import codes
from tests.harness import REPOSITORY
from tests.harness.processes import closed_port, free_port, processes_with
from tests.harness.waiting import eventually

from .conftest import SECRET, Bench, spec_of

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


class Names:
    """In place of ``socket.getaddrinfo``: which names are known, and how often each is asked for in vain."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **asked_before_known: int) -> None:
        self.left = asked_before_known
        monkeypatch.setattr("socket.getaddrinfo", self.ask)
        monkeypatch.setattr(store, "_NAME_SECONDS", 0.001)

    def ask(self, name: str, *_: object, **__: object) -> list[object]:
        self.left[name] -= 1
        if self.left[name] >= 0:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 0))]


def test_a_name_that_is_not_known_yet_is_asked_for_again_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    Names(monkeypatch, pod0=3, lost=1000, pod1=2)
    assert store.await_names("--master-addr", ["pod0"], 300, lines.append) is None
    (line,) = lines
    assert "--master-addr pod0 cannot be resolved on host" in line
    assert "trying again, for at most 300 s (--rendezvous-timeout)" in line
    assert store.await_names("--recover-coordinator", ["lost", "pod1"], 300, lines.append) is None, "one is enough"
    assert len(lines) == 2


def test_a_name_that_stays_unknown_or_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "cannot be resolved on host" in str(store.await_names("--master-addr", ["a" * 64], 1e9, pytest.fail))
    Names(monkeypatch, pod0=1000)
    assert "cannot be resolved on host" in str(store.await_names("--master-addr", ["pod0"], 0.01, lambda _: None))


RESOLVER = """
    import os, socket
    known = socket.getaddrinfo

    def ask(name, *more, **options):
        if name == "localhost" and not os.path.exists("known"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return known(name, *more, **options)

    socket.getaddrinfo = ask
    """


@pytest.mark.slow
def test_the_name_of_node_0_may_be_known_after_the_launchers_have_started(bench: Bench) -> None:
    """As of a new pod; so it may be on node 0 itself."""
    bench.script(RESOLVER, "sitecustomize.py")
    options = ["--nnodes", 2, "--master-addr", "localhost", "--master-port", free_port()]
    environment = {**SECRET, "PYTHONPATH": f"{bench.folder}:{REPOSITORY}"}
    script = bench.script("print('UP')")
    nodes = [bench.start(*options, "--node-rank", node, script, environment=environment) for node in (0, 1)]
    for node in nodes:
        node.wait_for("--master-addr localhost cannot be resolved on host")
    bench.go("known")
    for node in nodes:
        node.ends(0)


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
    eventually(lambda: first.left() == [], "node 0 was lost")
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
    first.wait_for("a message for node 1 is ignored")
    assert (first.process.poll(), second.process.poll()) == (None, None)
    for rank in (0, 1):
        (bench.folder / f"go{rank}").touch()
    assert (first.wait(), second.wait()) == (0, 0), first.err + second.err


class Kept:
    """A store in this process."""

    def __init__(self, values: dict[str, str]) -> None:
        self.values = values

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def wait(self, keys: list[str], timeout: object) -> None:
        if not self.check(keys):
            raise RuntimeError("nobody has set it in time")

    def queue_push(self, key: str, value: str) -> None:
        self.values[key] = value

    def set_timeout(self, timeout: object) -> None:
        """It waits for nothing."""


SEAL = Seal(Secret(b"one that all launchers of a test share"))


@pytest.fixture
def second(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, int]]:
    """How a launcher of node 1 ends that finds another one welcomed there, and these values in the store."""
    monkeypatch.setattr(guest, "timed_out", lambda error: True)
    monkeypatch.setattr(guest, "LOST_SECONDS", 0.05)
    monkeypatch.setattr(guest, "BEAT_SECONDS", 0.01)

    def end(**values: object) -> tuple[str, int]:
        told: list[tuple[object, ...]] = []
        events = SimpleNamespace(note="note", failed="failed")
        launcher = Guest(
            spec_of(nnodes=2, node_rank=1, nproc_per_node=1), SEAL, events, lambda *words, told=told: told.append(words)
        )
        launcher._run_id = "r"
        kept = Kept(
            {PREFIX + key.replace("_", "/"): SEAL.wrap(key.replace("_", "/"), "r", v) for key, v in values.items()}
        )
        launcher.say(kept, {})
        if "node_1" in values:  # its writer lives, and writes it again
            kept.values[PREFIX + "node/1"] = SEAL.wrap("node/1", "r", values["node_1"])
        launcher._come_second(kept)
        assert [kind for kind, *_ in told] == ["note", "failed"]
        return told[1][1:3]

    return end


def test_a_launcher_that_comes_second_ends_by_what_became_of_the_first(second: Callable[..., tuple[str, int]]) -> None:
    there = {"addresses": [["10.0.0.1", 7], ["fd00::1", 8]]}
    reason, code = second(coordinators=there)
    assert code == LEFT_OUT
    assert "the first launcher of node 1 is lost: the run continues without this node" in reason
    assert "recover-run --join --recover-coordinator 10.0.0.1:7,[fd00::1]:8 --world-size 2 --master-addr a" in reason
    assert re.search(r" --master-port \d+$", reason), "the line can be copied"
    reason, code = second(coordinators=there, node_1={"nonce": "the first's", "host": "h2", "count": 9})
    assert code == REFUSED
    assert "node rank 1 has been taken by another launcher of this launch, on host h2" in reason
    assert second(end={"reason": "it is over", "code": 10}) == ("it is over", 10)


@pytest.mark.parametrize(
    ("address", "fault_tolerant"), [("192.0.2.1", True), ("127.0.0.1", True), ("127.0.0.1", False)]
)
def test_a_node_takes_part_without_a_door_where_its_address_is_not_its_own(address: str, fault_tolerant: bool) -> None:
    """Behind NAT; and where nobody looks at the door it has none."""
    shape = {"nnodes": 5, "nproc_per_node": 1, "control_plane": False}
    plan = spec_of(**shape, node_rank=4, node_address=address, fault_tolerant=fault_tolerant)
    node = Guest(plan, SEAL, SimpleNamespace(), pytest.fail)
    job = {**shape, "candidates": [0, 1, 2], "run_id": "r", "flags": codes(plan.flags)}
    kept = Kept({PREFIX + "job": SEAL.wrap("job", "", job)})
    kept.values[PREFIX + "welcome/4"] = SEAL.wrap("welcome/4", "r", {"nonce": node._message["nonce"]})
    assert node._take_part(kept) is not None
    said = SEAL.open("node/4", "r", kept.get(PREFIX + "node/4"))
    assert (said["door"] is not None) is (address == "127.0.0.1" and fault_tolerant)


@pytest.mark.parametrize(
    ("rank", "knows", "without", "told"),
    [(1, (), [1], LEFT_OUT), (2, (), [1], START_AGAIN), (2, (1,), [1], None), (2, (1,), [1, 3], START_AGAIN)],
)
def test_who_was_left_out_of_a_start_has_no_part_in_it_and_others_make_theirs_without_it(
    monkeypatch: pytest.MonkeyPatch, rank: int, knows: tuple[int, ...], without: list[int], told: int | None
) -> None:
    said: list[tuple] = []
    plan = spec_of(nnodes=5, node_rank=rank, nproc_per_node=1, spares=2, without=knows)
    node = Guest(plan, SEAL, SimpleNamespace(failed="failed"), lambda *words: said.append(words))
    attempts: list[int] = []
    monkeypatch.setattr(guest, "keep_attempt", attempts.append)
    job = {"run_id": "r", "without": without, "attempt": 4}
    there = {"addresses": [["10.0.0.1", 7]]}
    kept = Kept({PREFIX + "coordinators": SEAL.wrap("coordinators", "r", there)})
    assert node._elsewhere(kept, job) is (told is not None)
    assert [words[2] for words in said] == [told] * (told is not None)
    if told == LEFT_OUT:
        assert "node 1 was lost at the start of the run, which started again without it: the run cont" in said[0][1]
        assert "recover-run --join --recover-coordinator 10.0.0.1:7" in said[0][1]
    elif told:
        assert said[0][3] == tuple(without)
        assert attempts == [4]
    said.clear()
    node._run_id = "r"
    assert node._obey(kept, {"reason": "node 1 is lost", "code": START_AGAIN, "without": without})
    assert said[0][1:] == ("node 1 is lost", START_AGAIN, tuple(without)) if rank == 2 else said[0][2] == LEFT_OUT


@pytest.mark.parametrize(("spares", "told"), [(3, (START_AGAIN, (1, 3, 2))), (2, (EXIT_NO_REPLICA, (1, 3)))])
def test_a_node_that_does_not_come_to_the_start_that_is_made_again_is_left_out_too(
    spares: int, told: tuple[int, tuple[int, ...]]
) -> None:
    said: list[tuple] = []
    ended: list[tuple] = []
    more = {"rendezvous_timeout": -1.0, "attempt": 1, "max_restarts": 2, "without": (1, 3), "spares": spares}
    plan = spec_of(nnodes=5, nproc_per_node=1, **more)
    events = SimpleNamespace(failed="failed", note="note")
    node = Host(plan, Kept({}), SEAL, events, lambda *words: said.append(words), lambda *words: ended.append(words))
    node._newcomer(4, {"nonce": "n", "count": 1, "host": "h", "coordinator": ["10.0.0.4", 7]})
    assert not node._check_members()
    (failed,) = [words[1:] for words in said if words[0] == "failed"]
    assert (failed[1:], ended) == (told, [failed])
    assert ("without node 1, 3, 2, spares of node 4 as workers 1-3" in failed[0]) is (told[0] == START_AGAIN)


def test_a_node_0_that_was_stopped_itself_reads_what_others_have_said_before_it_takes_them_for_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    words = {"nonce": "n", "count": 2, "report": []}
    kept = Kept({PREFIX + "node/1": SEAL.wrap("node/1", "r", words)})
    events = SimpleNamespace(node_lost="lost", report="report")
    plan = spec_of(nnodes=2, nproc_per_node=1, control_plane=False)
    node = Host(plan, kept, SEAL, events, lambda what, *_: said.append(what), pytest.fail)
    node._missing, node._members = set(), {1: _Member("n", 1, -1000.0)}
    monkeypatch.setattr(host, "BEAT_SECONDS", 0.0)
    monkeypatch.setattr(node, "_rung", list)
    node.run()
    assert said == ["report"]


def test_who_hosts_a_candidate_is_not_reckoned_anew_for_each_of_a_thousand_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Host(spec_of(nnodes=1000), Kept({}), SEAL, SimpleNamespace(note=""), lambda *_: None, pytest.fail)
    assert len(node._spec.candidate_nodes) == 3
    monkeypatch.setattr(spec, "min", pytest.fail, raising=False)
    for rank in range(3, 9):
        assert node._newcomer(rank, {"nonce": "n", "count": 1, "host": "h"})


@pytest.mark.parametrize(("fault_tolerant", "code"), [(True, EXIT_NO_REPLICA), (False, LAUNCH_FAILED)])
def test_a_node_0_that_is_lost_before_all_have_come_is_no_fault_of_the_launch(
    monkeypatch: pytest.MonkeyPatch, fault_tolerant: bool, code: int
) -> None:
    said: list[tuple] = []
    events = SimpleNamespace(failed="failed", accepted="accepted")
    plan = spec_of(nnodes=2, node_rank=1, nproc_per_node=1, fault_tolerant=fault_tolerant)
    node = Guest(plan, SEAL, events, lambda *words: said.append(words))
    monkeypatch.setattr(node, "_join", lambda: (Kept({}), SimpleNamespace()))
    monkeypatch.setattr(guest, "timed_out", lambda error: False)
    node.run()
    assert [words[0] for words in said] == ["accepted", "failed"]
    assert said[1][2] == code


def test_a_launcher_of_node_0_that_comes_second_hears_of_the_run_from_the_others() -> None:
    """It ends by what node 1 has told its store, where a secret proves that."""
    words = {"host": "h2", "nonce": "n", "count": 1, "run_continues": "10.0.0.1:7"}
    for seal, code in ((SEAL, LEFT_OUT), (Seal(None), None)):
        told: list[tuple[object, ...]] = []
        events = SimpleNamespace(note="note", failed="failed")
        plan = spec_of(nnodes=2, nproc_per_node=1, control_plane=False)
        node = Host(plan, Kept({}), seal, events, lambda *say, told=told: told.append(say), lambda *_: None)
        assert node._heard(1, words) is (code is None)
        assert [words[2] for words in told if words[0] == "failed"] == [code] * (code is not None)


def test_a_node_tells_another_launch_of_its_run_only_while_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = spec_of(nnodes=2, node_rank=1, nproc_per_node=1, control_plane=True)
    job = {"nnodes": 2, "nproc_per_node": 1, "control_plane": True, "flags": codes(plan.flags), "attempt": 0}
    for continues in (False, True):
        kept = Kept({PREFIX + "job": SEAL.wrap("job", "", {**job, "run_id": "another"})})
        monkeypatch.setattr(guest, "join_store", lambda *_, kept=kept, **__: kept)
        node = Guest(plan, SEAL, SimpleNamespace(run_continues=lambda yes=continues: yes), pytest.fail)
        node._run_id, node._coordinators = "r", "10.0.0.1:7"
        assert node._find_again() is None
        assert kept.check([PREFIX + "node/1"]) is continues
    words = SEAL.open("node/1", "another", kept.get(PREFIX + "node/1"))
    assert words["run_continues"] == "10.0.0.1:7"
    for flags, told in ((codes(plan.flags), True), (codes({"--lr": "other"}), False)):
        again = Kept({PREFIX + "job": SEAL.wrap("job", "", {**job, "run_id": "r2", "flags": flags, "attempt": 1})})
        monkeypatch.setattr(guest, "join_store", lambda *_, again=again, **__: again)
        said: list[tuple[object, ...]] = []
        events = SimpleNamespace(run_continues=lambda: True, failed="failed")
        assert Guest(plan, SEAL, events, lambda *words, said=said: said.append(words))._find_again() is None
        assert bool(said) is told, "no start of another training is joined by one that goes on"
