"""Over which interface workers talk: that by which their hosts reach each other, whatever names resolve to."""

from __future__ import annotations

import pytest

from recover_megatron.launch.plan import interface_of, interfaces, variables_for
from tests.harness.waiting import DEADLINE
from tests.hosts.conftest import can_have_hosts
from tests.hosts.hosts import Hosts

from .conftest import SECRET, Bench
from .test_store import ALL_REDUCE

__all__ = ["can_have_hosts"]  # a fixture

FOUND = {"127.0.0.1": "lo", "10.0.0.1": "eth0", "10.0.0.2": "eth0", "172.17.0.1": "docker0", "fd00::1": "eth1"}
SHOW = """
    import os
    print("SET", os.environ.get("GLOO_SOCKET_IFNAME"), os.environ.get("NCCL_SOCKET_IFNAME"))
    """


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


def test_what_the_user_has_set_stands() -> None:
    assert variables_for("127.0.0.1", {"NCCL_SOCKET_IFNAME": "ib0"})[0] == {"GLOO_SOCKET_IFNAME": "lo"}
    assert variables_for("127.0.0.1", {"NCCL_SOCKET_IFNAME": "", "GLOO_SOCKET_IFNAME": "eth9"}) == ({}, "")


def test_an_address_that_no_interface_has_is_left_to_torch_and_said() -> None:
    variables, about = variables_for("192.0.2.77", {})
    assert variables == {}
    assert "no interface of this host has the address 192.0.2.77" in about


@pytest.mark.slow
def test_the_workers_of_one_node_talk_over_the_loopback(bench: Bench) -> None:
    launch = bench.run(bench.script(SHOW), environment={"GLOO_SOCKET_IFNAME": "mine"})
    assert "SET mine =lo" in launch.out


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
            assert f"workers talk over the interface e0 ({hosts.address(host)})" in out.read_text()
