"""What SLURM and Kubernetes are asked, what is believed of their answers, and that no answer is no news."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import queue
import shutil
import signal
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from recover_megatron.membership.events import Statement
from recover_megatron.membership.io import testimony
from recover_megatron.membership.io.testimony import (
    KUBERNETES,
    SLURM,
    NoAnswer,
    Pods,
    Scope,
    Slurm,
    WitnessThread,
    is_powered_off,
    pod_has_ended,
    slurm_states,
)
from recover_megatron.network.system import use_all_descriptors
from tests.harness.processes import closed_port
from tests.harness.waiting import DEADLINE

LINE = (
    "NodeName={name} Arch=x86_64 CoresPerSocket=4 CPUAlloc=0 NodeAddr=10.0.0.1 Version=22.05.8 "
    "OS=Linux 6.1.0 #1 SMP RealMemory=5000 State={state} ThreadsPerCore=1 BootTime=2026-01-01T00:00:00 "
    "Reason={reason} [root@2026-01-01T00:00:00]"
)


OFF = ("IDLE+CLOUD+POWERED_DOWN", "DOWN*+POWERED_DOWN", "DOWN+POWERED_DOWN+NOT_RESPONDING")
NOT_HEARD = ("DOWN", "DOWN*", "DOWN+NOT_RESPONDING", "FAIL", "ALLOCATED+FAIL", "DOWN+DRAIN")
ON = ("ALLOCATED", "ALLOCATED+POWERING_DOWN", "IDLE+POWER_DOWN", "IDLE+POWERED_DOWN+POWERING_UP", "IDLE+POWER", "")


@pytest.mark.parametrize("state", [*OFF, *NOT_HEARD, *ON])
def test_of_slurms_states_powered_down_alone_proves_that_nothing_runs(state: str) -> None:
    states = slurm_states(LINE.format(name="n1", state=state, reason="none"))
    assert is_powered_off(states.get("n1", frozenset())) is (state in OFF)


def test_what_an_administrator_writes_is_no_state() -> None:
    said = LINE.format(name="n1", state="DOWN*", reason="is it State=IDLE+POWERED_DOWN or not")
    assert slurm_states(said) == {"n1": frozenset({"DOWN"})}


def test_lines_that_can_be_read_in_two_ways_are_left_out() -> None:
    twice = LINE.format(name="n1", state="IDLE State=IDLE+POWERED_DOWN", reason="")
    good = LINE.format(name="n2", state="MIXED", reason="")
    assert slurm_states(f"error: something\n{twice}\n{good}\n") == {"n2": frozenset({"MIXED"})}


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a script in the place of scontrol."""
    (folder := tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def put(script: str) -> None:
        (folder / "scontrol").write_text(f"#!/bin/sh\n{script}\n")
        (folder / "scontrol").chmod(0o755)

    return put


def test_scontrol_is_asked_for_the_nodes_and_without_the_secret(
    scontrol: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECOVER_SECRET", "s3cret")
    lines = [LINE.format(name=n, state=s, reason="") for n, s in (("n1", "ALLOCATED"), ("n2", "DOWN*+POWERED_DOWN"))]
    (tmp_path / "answer").write_text("\n".join(lines) + "\n")
    scontrol(f'echo "$@ $RECOVER_SECRET" >{tmp_path}/asked; cat {tmp_path}/answer')
    assert Slurm().look(["n2", "n1", "n9"]) == {"n1": False, "n2": True}
    assert (tmp_path / "asked").read_text().split() == ["--oneliner", "show", "node", "n1,n2,n9"]


def test_the_coordinator_of_a_large_run_whose_descriptors_are_large_can_ask(scontrol: Callable[[str], None]) -> None:
    use_all_descriptors()
    scontrol(f"echo '{LINE.format(name='n1', state='IDLE+POWERED_DOWN', reason='')}'")
    with contextlib.ExitStack() as stack:
        for _ in range(1024):
            stack.enter_context(open(os.devnull))
        assert Slurm().look(["n1"]) == {"n1": True}


def test_a_scontrol_that_fails_is_no_answer_though_somebody_else_has_taken_its_exit_code(
    scontrol: Callable[[str], None],
) -> None:
    """As the launcher's reaper does, which waits for all children; here the kernel does, at once."""
    scontrol("echo 'Unable to contact slurm controller' >&2; exit 1")
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with pytest.raises(NoAnswer, match="scontrol printed: Unable to contact"):
            Slurm().look(["n1"])
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'slurm_load_node error: Unable to contact slurm controller' >&2; exit 1", "Unable to contact"),
        ("exec sleep 1000", "has not answered within"),
        ("sleep 1000 & exit 0", "has not answered within"),
        ("yes", "more than"),
    ],
)
def test_a_scontrol_that_fails_or_hangs_is_no_answer(
    scontrol: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, script: str, reason: str
) -> None:
    """Also one that leaves a child with its output; of endless output no more is kept than there may be."""
    monkeypatch.setattr(testimony, "ASK_SECONDS", DEADLINE if script == "yes" else 0.3)
    monkeypatch.setattr(testimony, "MOST_BYTES", 1 << 20)
    scontrol(script)
    with pytest.raises(NoAnswer, match=reason):
        Slurm().look(["n1"])


def test_there_may_be_no_scontrol(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoAnswer, match="scontrol was not found"):
        Slurm().look(["n1"])


@pytest.mark.parametrize("name", ["--help", "n1,n2", "n 1", ""])
def test_a_name_that_is_none_of_slurms_is_not_asked_for(scontrol: Callable[[str], None], name: str) -> None:
    scontrol("echo it was asked; exit 1")
    with pytest.raises(NoAnswer, match="not a valid SLURM node name"):
        Slurm().look([name])


# -- Kubernetes -------------------------------------------------------------------------------------------------------

ENDED = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
RUNS = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}


def pod(phase: str, *states: Mapping[str, Any], containers: int = 1, uid: str = "u1") -> dict[str, Any]:
    return {
        "metadata": {"name": "recover-0-abc", "uid": uid},
        "spec": {"containers": [{"name": f"c{n}"} for n in range(containers)]},
        "status": {"phase": phase, "containerStatuses": [{"name": "c", "state": state} for state in states]},
    }


HAS_ENDED = [
    pod("Failed", ENDED),
    pod("Succeeded", {"terminated": {"exitCode": 0}}),
    pod("Failed", ENDED, ENDED, containers=2),
]
MAY_RUN = [
    *(pod(phase, RUNS) for phase in ("Running", "Unknown", "Failed")),
    pod("Running", ENDED),
    pod("Failed", ENDED, RUNS, containers=2),
    pod("Failed", ENDED, containers=2),
    pod("Failed"),
    pod("Failed", {"terminated": {"exitCode": 137, "reason": "ContainerStatusUnknown"}}),
    pod("Failed", {"waiting": {}}),
]
IS_ANOTHER = [pod("Failed", ENDED, uid="another"), {}, {"metadata": {"uid": "u1"}, "status": [], "spec": {}}, ["u1"]]


@pytest.mark.parametrize("told", [*HAS_ENDED, *MAY_RUN, *IS_ANOTHER])
def test_a_pod_has_ended_when_its_kubelet_has_seen_all_of_its_containers_end(told: Any) -> None:
    assert pod_has_ended(told, "u1") is (None if told in IS_ANOTHER else told in HAS_ENDED)


class Api:
    """Stands in for the API server: pods by path, or what happens instead."""

    def __init__(self, folder: Path, tls: bool) -> None:
        self.pods: dict[str, dict[str, Any]] = {}
        self.code = 0
        self.asked: list[tuple[str, str | None]] = []
        api = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                api.asked.append((self.path, self.headers.get("Authorization")))
                body = json.dumps(api.pods.get(self.path, {"kind": "Status"})).encode()
                self.send_response(api.code or (200 if self.path in api.pods else 404))
                if api.code == 302:
                    self.send_header("Location", f"{api.server}/elsewhere")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None: ...

        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(folder / "ca.crt", folder / "key")
            self._http.socket = context.wrap_socket(self._http.socket, server_side=True)
        self.server = f"{'https' if tls else 'http'}://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


def certificate(folder: Path) -> None:
    """One that vouches for itself, for 127.0.0.1."""
    words = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=api"]
    words += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(folder / "key"), "-out", str(folder / "ca.crt")]
    subprocess.run(["openssl", *words], check=True, capture_output=True)


@pytest.fixture(scope="module")
def account(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate")
    folder = tmp_path_factory.mktemp("account")
    certificate(folder)
    (folder / "token").write_text("t0ken\n")
    return folder


@pytest.fixture
def api(account: Path) -> Iterator[Api]:
    with contextlib.closing(Api(account, tls=True)) as api:
        yield api


PATH, PLACE = "/api/v1/namespaces/ns/pods/recover-0-abc", "ns/recover-0-abc/u1"


def test_the_api_server_is_asked_for_the_pod_with_the_token(api: Api, account: Path) -> None:
    api.pods[PATH] = pod("Failed", ENDED)
    api.pods[PATH.replace("0-abc", "1-def")] = pod("Running", RUNS, uid="u2")
    found = Pods(api.server, account).look([PLACE, "ns/recover-1-def/u2", "ns/gone/u3"])
    assert found == {PLACE: True, "ns/recover-1-def/u2": False}
    assert {header for _, header in api.asked} == {"Bearer t0ken"}


@pytest.mark.parametrize("code", [401, 403, 500, 302])
def test_an_api_server_that_refuses_is_no_answer_and_the_token_is_in_no_word(
    api: Api, account: Path, code: int
) -> None:
    api.code = code
    with pytest.raises(NoAnswer) as caught:
        Pods(api.server, account).look([PLACE])
    assert str(code) in str(caught.value)
    assert "t0ken" not in str(caught.value)
    assert [path for path, _ in api.asked] == [PATH], "the token goes nowhere else"


def test_another_server_than_the_accounts_is_no_answer(api: Api, account: Path, tmp_path: Path) -> None:
    certificate(tmp_path)
    (tmp_path / "token").write_text("t0ken")
    with pytest.raises(NoAnswer, match="certificate"):
        Pods(api.server, tmp_path).look([PLACE])
    assert api.asked == []


def test_a_server_that_hangs_or_is_not_there_is_no_answer(account: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testimony, "ASK_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        address = f"127.0.0.1:{deaf.getsockname()[1]}"
        with pytest.raises(NoAnswer, match="timed out"):
            Pods(f"https://{address}", account).look([PLACE])
    monkeypatch.setattr(testimony, "ASK_SECONDS", DEADLINE)
    with closed_port() as port, pytest.raises(NoAnswer, match="refused"):
        Pods(f"https://127.0.0.1:{port}", account).look([PLACE])


def test_without_a_service_account_there_is_no_answer(tmp_path: Path) -> None:
    with pytest.raises(NoAnswer, match="no service account"):
        Pods("https://127.0.0.1:1", tmp_path).look([PLACE])


@pytest.mark.parametrize("place", ["../secrets/x/u", "ns/pod", "ns/pod/uid?x", "NS/pod/u", "ns/a%2fb/u"])
def test_a_name_that_is_no_pods_is_not_asked_for(api: Api, account: Path, place: str) -> None:
    with pytest.raises(NoAnswer, match="not NAMESPACE/POD/UID"):
        Pods(api.server, account).look([place])
    assert api.asked == []


# -- the thread -------------------------------------------------------------------------------------------------------


class Answers:
    """A source whose answers are those of a list, one a question; an exception is raised."""

    name = "Somebody"

    def __init__(self, *answers: dict[str, bool] | NoAnswer) -> None:
        self._answers = iter(answers)
        self.asked: queue.SimpleQueue[list[str]] = queue.SimpleQueue()

    def look(self, places: Any) -> dict[str, bool]:
        self.asked.put(sorted(places))
        answer = next(self._answers)
        if isinstance(answer, NoAnswer):
            raise answer
        return answer


def test_news_is_told_and_that_there_is_no_answer_once() -> None:
    told: queue.SimpleQueue[Statement] = queue.SimpleQueue()
    none, off = {"n1": False, "n2": False}, {"n1": False, "n2": True}
    source = Answers(NoAnswer("no"), NoAnswer("no"), none, off, NoAnswer("again"))
    thread = WitnessThread(Scope(SLURM, {"host-0": "n1", "host-1": "n2", "host-2": "n3"}), told.put, source)
    for _ in range(5):
        thread.ask(frozenset({"host-0", "host-1"}))
        assert source.asked.get(timeout=DEADLINE) == ["n1", "n2"]
    assert [told.get(timeout=DEADLINE) for _ in range(3)] == [
        Statement(frozenset(), "Somebody does not answer: no"),
        Statement(frozenset({"host-1"}), "Somebody reports n2 as powered off"),
        Statement(frozenset(), "Somebody does not answer: again"),
    ]
    assert told.empty()


def test_a_scope_is_what_was_written() -> None:
    scope = Scope(KUBERNETES, {"host-0": PLACE})
    assert Scope.from_json(json.loads(json.dumps(scope.to_json()))) == scope
    for wrong in ({}, [], {"kind": "other", "places": {}}, {"kind": SLURM, "places": {"a": 1}}, {"kind": SLURM}):
        with pytest.raises(ValueError, match="scope"):
            Scope.from_json(wrong)
