"""A worker is what ``python SCRIPT`` would be, with some variables more, which tell the interface, too."""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from recover_megatron.arguments import parse_addresses
from recover_megatron.launch.command_line import arguments
from recover_megatron.launch.nodes import addresses as own_addresses
from recover_megatron.launch.nodes import control_plane
from recover_megatron.launch.nodes.addresses import interface_of, interfaces, loopback, variables_for
from recover_megatron.launch.nodes.control_plane import ControlPlane
from recover_megatron.launch.workers import successors
from recover_megatron.launch.workers.environment import WorkerEnvironment
from recover_megatron.membership.__main__ import address_of, make_listener
from recover_megatron.network.connection import family_of
from recover_megatron.network.event_loop import EventLoop
from recover_megatron.variables import OF_A_WORKER
from tests.harness.waiting import DEADLINE
from tests.hosts.conftest import can_have_hosts
from tests.hosts.hosts import Hosts

from .conftest import SECRET, Bench, spec_of
from .test_newcomers import ended
from .test_store import ALL_REDUCE

SHOW = "import json, os, sys; print('ENV', json.dumps(dict(os.environ)))"


def environments(launch):
    found = {}
    for line in launch.out.splitlines():
        if " ENV " in line:
            variables = json.loads(line.partition(" ENV ")[2])
            found[variables["RANK"]] = variables
    return found


def test_workers_get_torchruns_variables_and_ours(bench):
    script, of_a_run_around = bench.script(SHOW), dict.fromkeys(["RECOVER_JOIN", "RECOVER_PREPARED"], "1")
    environment = {"SOME_OF_MINE": "kept", **of_a_run_around}
    launch = bench.run("--nproc-per-node", 2, "--log-dir", "logs", script, environment=environment)
    found = environments(launch)
    assert set(found) == {"0", "1"}
    for rank, variables in found.items():
        expected = {
            **dict.fromkeys(("LOCAL_RANK", "ROLE_RANK", "RECOVER_WORKER_ID"), rank),
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), "2"),
            "ROLE_NAME": "default",
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "RECOVER_LOG_DIR": str(bench.folder / "logs"),
            "SOME_OF_MINE": "kept",
            **dict.fromkeys(of_a_run_around),
        }
        assert {name: variables.get(name) for name in expected} == expected
        assert f":{variables['MASTER_PORT']}," in launch.err
        assert variables["TORCHELASTIC_RUN_ID"]
    assert found["0"]["RECOVER_LAUNCH_ID"] == found["1"]["RECOVER_LAUNCH_ID"]


def test_a_newcomer_of_the_library_finds_no_store_in_which_it_would_wait_for_ever():
    def store_of(worker: object, **fields: object) -> list[str]:
        spec = spec_of(max_restarts=1, environ={"MASTER_ADDR": "mine"}, **fields)
        environment = WorkerEnvironment(spec, print, dict, lambda: "r")
        return [name for name in environment.of(worker) if name.startswith("MASTER_")]

    launched = successors.launched(spec_of())[0]
    newcomer = successors.Replacements(spec_of(max_restarts=1)).of(ended(launched, -9), 0)
    both = ["MASTER_ADDR", "MASTER_PORT"]
    assert (store_of(newcomer, elastic=True), store_of(launched, elastic=True), store_of(newcomer)) == ([], both, both)


def test_the_console_says_why_a_newcomer_of_the_library_cannot_make_a_process_group(bench):
    script = bench.script(
        """
        import os, time
        from recover_megatron.membership.io.session import connect

        os.environ["MASTER_ADDR"]  # as torch asks for it
        session = connect()
        session.join({})
        print("JOINED", flush=True)
        while not os.path.exists("go"):
            time.sleep(0.01)
        """
    )
    launch = bench.up(2, "--elastic", "--max-restarts", 1, script, says="JOINED")
    bench.kill(1, count=2)
    launch.wait_for("cannot call torch.distributed.init_process_group()")
    bench.go()
    launch.wait()


@pytest.mark.slow
def test_omp_threads_are_limited_only_if_the_user_has_not_chosen(bench, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # scripts/test.sh has chosen
    script = bench.script(SHOW)
    chosen = bench.run("--nproc-per-node", 2, script, environment={"OMP_NUM_THREADS": "3"})
    assert environments(chosen)["0"]["OMP_NUM_THREADS"] == "3"
    assert "OMP_NUM_THREADS" not in chosen.err
    limited = bench.run("--nproc-per-node", 2, script)
    assert limited.err.count("OMP_NUM_THREADS") == 1
    alone = bench.run(script)
    assert "OMP_NUM_THREADS" not in environments(alone)["0"]


def test_variables_of_another_launch_reach_no_process():
    spec, _ = arguments.parse(["script.py"], {**dict.fromkeys(OF_A_WORKER, "0"), "MINE": "kept"})
    assert spec.environ == {"MINE": "kept"}
    assert {"RECOVER_WORKER_ID", "RECOVER_LOG_DIR", "RECOVER_JOIN"} <= set(OF_A_WORKER)


def test_log_dir_variable_is_only_that_of_the_option(bench):
    launch = bench.run(bench.script(SHOW), environment={"RECOVER_LOG_DIR": "/of/another/launch"})
    assert "RECOVER_LOG_DIR" not in environments(launch)["0"]


@pytest.mark.slow
def test_two_launches_have_different_ids(bench):
    script = bench.script(SHOW)
    ids = {environments(bench.run(script))["0"]["RECOVER_LAUNCH_ID"] for _ in range(2)}
    assert len(ids) == 2


def test_the_first_line_names_what_is_started(bench):
    script = bench.script("")
    first = bench.run("--nproc-per-node", 2, "--log-dir", "logs", script).err.splitlines()[0]
    assert "2 workers" in first
    assert "store 127.0.0.1:" in first
    assert str(bench.folder / "logs") in first


def test_a_worker_leads_a_session_of_its_own_and_reads_nothing(bench):
    script = bench.script("import os, sys; print('LEADS', os.getsid(0) == os.getpid(), repr(sys.stdin.read()))")
    assert "LEADS True ''" in bench.run(script).out


def test_the_script_runs_as_it_does_under_python(bench):
    (bench.folder / "sub").mkdir()
    bench.script("VALUE = 1", "sub/beside.py")
    script = bench.script("import beside, sys; print('AT', __file__, __name__, sys.path[0])", "sub/script.py")
    launch = bench.run(script)
    assert f"AT {bench.folder / 'sub/script.py'} __main__ {bench.folder / 'sub'}" in launch.out


def test_workers_do_not_get_what_recovery_cannot_live_with_and_the_console_says_so(bench):
    script = bench.script(SHOW)
    given = {"TORCH_GLOO_LAZY_INIT": "1", "TORCH_DISTRIBUTED_DEBUG": "DETAIL", "TORCH_DIST_USE_NCCL2": ""}
    launch = bench.run("--nproc-per-node", 2, script, environment=given)
    found = environments(launch)
    assert [[its.get(name) for name in given] for its in found.values()] == [[None, "INFO", "0"]] * 2
    for line in (
        "TORCH_GLOO_LAZY_INIT=1 in the environment is overruled (removed)",
        "TORCH_DISTRIBUTED_DEBUG=DETAIL in the environment is overruled (INFO instead)",
    ):
        assert launch.err.count(line) == 1


def test_a_run_that_gloo_cannot_be_aborted_in_is_refused(bench):
    script = bench.script(SHOW, "pretrain_mine.py")
    launch = bench.run(script, "--recover", "--mock-data", environment={"GLOO_DEVICE_TRANSPORT": "TCP_TLS"}, ends=2)
    assert "GLOO_DEVICE_TRANSPORT=TCP_TLS: recovery can abort only plain TCP connections of gloo" in launch.err
    assert environments(launch) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "code", "shown"),
    [
        ("sys.exit(5)", 5, ""),
        ("sys.exit('a message')", 1, "a message"),
        ("sys.exit()", 0, ""),
        ("raise ValueError('uncaught')", 1, "ValueError: uncaught"),
        ("os._exit(9)", 9, ""),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt"),
        ("atexit.register(print, 'AT EXIT')", 0, "AT EXIT"),
        ("print('unflushed', end='')", 0, "unflushed"),
        ("threading.Thread(target=lambda: (time.sleep(0.2), print('THREAD DONE'))).start()", 0, "THREAD DONE"),
        ("def f(): assert False, 'deep'\n    f()", 1, "AssertionError: deep"),
    ],
)
def test_a_worker_ends_as_the_script_does_under_python(bench, body, code, shown):
    script = bench.script(
        f"import atexit, os, signal, sys, threading, time\nif __name__ == '__main__':\n    print('RUNS')\n    {body}\n"
    )
    bench.run("--log-dir", "logs", script, ends=code if code >= 0 else 128 - code)
    (worker,) = bench.workers()
    assert (worker["exit_code"] if worker["signal"] is None else -worker["signal"]) == code
    log = bench.log()
    assert shown in log
    assert "RUNS" in log
    assert "recover_megatron" not in log


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_multiprocessing_works_in_a_worker(bench, method):
    script = bench.script(
        """
        import multiprocessing, os, sys
        def square(number):
            return number * number
        if __name__ == "__main__":
            with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:
                print("SQUARES", pool.map(square, [2, 3]), os.path.basename(sys.modules["__main__"].__file__))
        """
    )
    launch = bench.run(script, method)
    assert "SQUARES [4, 9] script.py" in launch.out


@pytest.mark.slow
def test_a_folder_as_script_runs_its_main(bench):
    (bench.folder / "folder").mkdir()
    (bench.folder / "folder/__main__.py").write_text("print('RAN')")
    launch = bench.run("folder")
    assert "RAN" in launch.out


__all__ = ["can_have_hosts"]  # a fixture

FOUND = {"127.0.0.1": "lo", "10.0.0.1": "eth0", "10.0.0.2": "eth0", "172.17.0.1": "docker0", "fd00::1": "eth1"}


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("10.0.0.2", "eth0"),
        ("127.0.0.1", "lo"),
        ("fd00::1", "eth1"),
        ("10.0.0.9", None),
        ("no-such-host.invalid", None),
    ],
)
def test_the_interface_is_that_of_the_address(host: str, name: str | None) -> None:
    assert interface_of(host, FOUND) == name


def test_this_host_has_a_loopback() -> None:
    assert interfaces()["127.0.0.1"] == "lo"
    assert variables_for("127.0.0.1", {})[0] == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}


NONE = "192.0.2.77"
"""No host's address: it is for examples."""


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this host has no IPv6")
def test_a_host_without_the_loopback_of_ipv4_has_that_of_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loopback() == "127.0.0.1"
    monkeypatch.setattr(own_addresses, "LOOPBACK", NONE)
    assert loopback() == "::1"
    monkeypatch.setattr(control_plane, "LOOPBACK", NONE)
    control = ControlPlane(spec_of(), EventLoop(), pytest.fail, SimpleNamespace())
    addresses, listeners, host = control._places(None)
    for _, listener in listeners:
        listener.close()
    assert {address for address, _ in addresses} == {host} == {"::1"}, "workers are told, or they would take the other"


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this host has no IPv6")
def test_a_candidate_listens_on_an_address_of_ipv6_and_says_so() -> None:
    """recover-status finds it by what it says."""
    with make_listener("[::1]:0", None) as listener:
        assert parse_addresses(address_of(listener)) == [("::1", listener.getsockname()[1])]


def test_a_name_that_has_addresses_of_ipv6_alone_can_be_listened_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As RECOVER_HOST."""
    known = socket.getaddrinfo

    def ask(name: str, *more: object, **options: object) -> list[object]:
        return known("::1" if name == "node6" else name, *more, **options)

    monkeypatch.setattr(socket, "getaddrinfo", ask)
    monkeypatch.setattr(socket, "create_server", lambda address, **how: how["family"])
    assert own_addresses.listen("node6") == socket.AF_INET6
    assert [family_of(host) for host in ("fd00::1", "10.0.0.1", "localhost")] == [
        socket.AF_INET6,
        socket.AF_INET,
        socket.AF_INET,
    ]


@pytest.mark.parametrize(
    ("addresses", "told"),
    [
        (["10.9.9.9", "fd00::5"], "fd00::5"),  # the first is another host's
        (["10.0.0.5", "fd00::5"], "node"),
        (["10.9.9.9", "fd00::9"], "node"),
        (["10.0.0.5"], "node"),  # other hosts may know the name by another address, across NAT
        (["127.0.0.1", "10.9.9.9"], "node"),
    ],
)
def test_of_a_name_with_several_addresses_the_one_of_this_host_is_told(
    monkeypatch: pytest.MonkeyPatch, addresses: list[str], told: str
) -> None:
    here = {"127.0.0.1": "lo", "10.0.0.5": "eth0", "fd00::5": "eth0"}
    monkeypatch.setattr(own_addresses, "interfaces", lambda: here)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", (each, 0)) for each in addresses])
    monkeypatch.setenv("RECOVER_HOST", "node")
    options, reasons = arguments.parse(["script.py"])
    assert not reasons
    assert options.node_address == told


def test_what_the_user_has_set_stands() -> None:
    assert variables_for("127.0.0.1", {"NCCL_SOCKET_IFNAME": "ib0"})[0] == {"GLOO_SOCKET_IFNAME": "lo"}
    assert variables_for("127.0.0.1", {"NCCL_SOCKET_IFNAME": "", "GLOO_SOCKET_IFNAME": "eth9"}) == ({}, "")


def test_an_address_that_no_interface_has_is_left_to_torch_and_said() -> None:
    variables, about = variables_for("192.0.2.77", {})
    assert variables == {}
    assert "no interface of this host has the address 192.0.2.77" in about


@pytest.mark.slow
def test_the_workers_of_one_node_talk_over_the_loopback(bench: Bench) -> None:
    found = environments(bench.run(bench.script(SHOW), environment={"GLOO_SOCKET_IFNAME": "mine"}))["0"]
    assert (found["GLOO_SOCKET_IFNAME"], found["NCCL_SOCKET_IFNAME"]) == ("mine", "=lo")


@pytest.mark.slow
def test_hosts_whose_names_do_not_resolve_find_each_other(can_have_hosts: None, bench: Bench) -> None:
    bench.script(ALL_REDUCE, "meet.py")
    with Hosts(2, resolve=False) as hosts:
        outs = [bench.folder / f"host{host}.out" for host in hosts]
        argv = ["--nproc-per-node", 1, bench.folder / "meet.py"]
        runs = [hosts.recover_run(host, *argv, out=outs[host - 1], environment=SECRET) for host in hosts]
        assert [run.wait(DEADLINE) for run in runs] == [0, 0], [out.read_text() for out in outs]
        for host, out in zip(hosts, outs, strict=True):
            assert f"TOTAL {host - 1} 2 3.0 e0" in out.read_text()
            assert f"workers communicate over the interface e0 ({hosts.address(host)})" in out.read_text()
