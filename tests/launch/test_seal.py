"""The store is open to everybody on the network: what a stranger writes there is not believed."""

import json

import pytest

from recover_megatron.launch.store import Seal, Unproved
from recover_megatron.membership.auth import Secret
from tests.harness.processes import free_port

from .conftest import SECRET, Bench
from .test_store import UNTIL_TOLD

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
