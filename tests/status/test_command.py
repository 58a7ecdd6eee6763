"""recover-status as a process, beside real coordinators and workers."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import ROOT, Cluster, cluster

from recover_megatron.membership.io.observer import Observer
from recover_megatron.membership.messages.to_coordinator import Observe
from recover_megatron.membership.view import MAX_OBSERVERS
from recover_megatron.membership.wire import read_secret_file
from recover_megatron.network import messages as wire
from tests.harness.waiting import DEADLINE

pytestmark = pytest.mark.slow

QUICK = {"heartbeat_interval": 0.2, "heartbeat_timeout": 3.0, "hang_timeout": 10.0, "start_timeout": 60.0}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Cluster]:
    with cluster(tmp_path, **QUICK) as made:
        yield made


def command(where: Path | list[tuple[str, int]], *arguments: str) -> list[str]:
    asked = str(where) if isinstance(where, Path) else ",".join(f"{host}:{port}" for host, port in where)
    return [sys.executable, "-m", "recover_megatron.status", asked, *arguments]


def environment(secret_file: Path) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RECOVER_")}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    # Wide: how notes are folded in 80 columns depends on how many digits a pid has.
    return {**clean, "PYTHONPATH": path, "RECOVER_SECRET_FILE": str(secret_file), "COLUMNS": "160"}


def status(
    run: Cluster,
    *arguments: str,
    code: int = 0,
    where: Path | list[tuple[str, int]] | None = None,
    secret_file: Path | None = None,
) -> str:
    """What the command prints: on stdout, or where it refuses on stderr."""
    asked, env = command(where or run.addresses, *arguments), environment(secret_file or run.secret_file)
    done = subprocess.run(asked, env=env, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout or done.stderr


def seen(run: Cluster, **options: Any) -> dict[str, Any]:
    return json.loads(status(run, "--json", **options))


def start_grid(run: Cluster, replicas: int, **options: Any) -> None:
    """Replicas of two workers each; every one has committed."""
    for worker in range(2 * replicas):
        place = {"replica": worker // 2, "position": worker % 2, "node": "n", "note": ""}
        run.start_worker(worker, status=place, microbatch=worker, **options)
    for process in run.workers.values():
        process.event("commit")


def test_a_running_job_is_shown_and_a_dead_worker_with_its_reason(run: Cluster) -> None:
    run.start_coordinators(6)
    start_grid(run, 3)
    before = seen(run)
    assert (before["state"], before["epoch"], before["replicas_running"], before["replicas_of_launch"]) == (
        "steady", 1, 3, 3,
    )  # fmt: skip
    places = {r["replica"]: [(w["worker"], w["position"]) for w in r["workers"]] for r in before["grid"]}
    assert places == {0: [(0, 0), (1, 1)], 1: [(2, 0), (3, 1)], 2: [(4, 0), (5, 1)]}
    run.workers[3].kill()
    run.continue_without(3)
    after = seen(run)
    assert [(gone["worker"], gone["fate"]) for gone in after["gone"]] == [(3, "dead")]
    why = after["gone"][0]["why"]  # with an answer unread in its socket the kernel resets the connection instead
    assert why in ("its connection was closed", "its connection failed: Connection reset by peer")
    assert after["replicas_running"] == 2
    assert [spare["worker"] for spare in after["spares"]] == [2]
    assert after["recoveries"][-1]["since_fault"] >= 0
    assert [fault["worker"] for fault in after["faults"]] == [3]
    assert after["committed"] > before["committed"]
    text = status(run, "--once")
    assert "replicas 2 of 3" in text
    assert why in text
    assert "replica 1 is not complete" in text


def test_progress_and_microbatch_come_from_heartbeats(run: Cluster) -> None:
    run.start_coordinators(2)
    start_grid(run, 1)
    secret, last = read_secret_file(run.secret_file), 0
    observer = Observer(run.addresses[0], secret)
    while last < 3:  # the next heartbeats tell
        run.workers[0].event("commit", start=run.workers[0].says())
        observer.close()
        observer = Observer(run.addresses[0], secret)
        rows = observer.ask().workers
        last = min(row["iteration"] for row in rows)
    observer.close()
    assert [(row["phase"], row["microbatch"]) for row in rows] == [("compute", 0), ("compute", 1)]


def test_a_live_view_ends_with_the_run_and_says_how(run: Cluster) -> None:
    run.start_coordinators(2)
    start_grid(run, 1, iterations=600)
    live = status(run, "--interval", "0.5")
    assert "HEALTHY" in live
    assert live.rfind("finished, exit code 0: all workers have left") > live.rfind("HEALTHY")


def test_a_live_view_on_a_terminal_is_ended_by_its_user(run: Cluster) -> None:
    run.start_coordinators(2)
    start_grid(run, 1)
    ours, theirs = pty.openpty()
    env = {**environment(run.secret_file), "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    live = subprocess.Popen(command(run.addresses), env=env, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE)
    os.close(theirs)
    shown = b""
    while shown.count(b"HEALTHY") < 2:  # it was drawn twice
        shown += os.read(ours, 4096)
    live.send_signal(signal.SIGINT)
    reader = threading.Thread(target=drain, args=(ours,), daemon=True)
    reader.start()
    assert live.wait(timeout=DEADLINE) == 0
    assert live.stderr is not None
    assert live.stderr.read() == b""
    live.stderr.close()
    reader.join(timeout=DEADLINE)
    os.close(ours)


def drain(descriptor: int) -> None:
    """Read until the other end of a terminal is closed."""
    try:
        while os.read(descriptor, 4096):
            pass
    except OSError:  # EIO: nobody has the other end open any more
        return


def test_the_candidate_that_leads_is_found_wherever_it_is_in_the_list_and_the_next_one_when_it_has_died(
    run: Cluster,
) -> None:
    run.start_coordinators(2, 3)
    assert seen(run)["state"] == "standby"
    assert "none of 2 workers are connected" in status(run, "--once")
    start_grid(run, 1)
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        nobody_there = nobody.getsockname()[:2]
    order = [nobody_there, run.addresses[2], run.addresses[1], run.addresses[0]]

    def leads(candidate: int) -> None:
        found, (host, port) = seen(run, where=order), run.addresses[candidate]
        assert (found["state"], found["address"]) == ("steady", f"{host}:{port}")
        assert (found["replicas_running"], found["replicas_of_launch"]) == (1, 1)

    leads(0)
    run.coordinators[0].kill()
    run.workers[0].event("plan", epoch=2)
    leads(1)


def test_a_log_folder_stands_for_the_addresses_and_tells_how_the_run_ended(run: Cluster, tmp_path: Path) -> None:
    run.start_coordinators(2)
    logs = tmp_path / "logs"
    logs.mkdir()
    assert "no events-<n>.jsonl" in status(run, where=logs, code=2)
    assert status(run, "--check", where=logs, code=3).startswith("UNKNOWN:")
    (logs / "events-0.jsonl").symlink_to(run.events_file(0))
    start_grid(run, 1)
    assert seen(run, where=logs)["state"] == "steady"
    assert status(run, "--check", where=logs).startswith("HEALTHY 1/1")
    for process in run.workers.values():
        process.kill()
    assert run.coordinators[0].exit_code() == 10
    assert status(run, "--check", where=logs, code=2).startswith("ENDED: exit ")
    over = seen(run, where=logs)
    assert (over["state"], over["code"], over["reason"]) == ("stopped", 10, "no live worker is left")


def test_a_wrong_secret_and_an_empty_port_are_told_in_a_sentence(run: Cluster, tmp_path: Path) -> None:
    run.start_coordinators(1)
    wrong = tmp_path / "wrong"
    wrong.touch(mode=0o600)
    wrong.write_text("not the secret of this job")
    assert "rejects the secret" in status(run, "--json", code=2, secret_file=wrong)
    assert "cannot be read" in status(run, code=2, secret_file=tmp_path / "none")
    wrong.chmod(0o644)
    assert "chmod 600" in status(run, code=2, secret_file=wrong)
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[:2]
    said = status(run, "--once", code=1, where=[port])
    assert "no coordinator answers" in said
    assert "the run is over" in said
    assert "--interval" in status(run, "--interval", "0.01", code=2)
    rejected = [event for event in run.events() if event["event"] == "rejected"]
    assert "does not know the job's secret" in rejected[0]["reason"]


def flood_until_closed(sock: socket.socket, data: bytes) -> None:
    sock.settimeout(DEADLINE)
    try:
        while True:
            sock.sendall(data)
    except ConnectionError:
        pass


def test_observers_that_flood_or_hang_hurt_nobody(run: Cluster) -> None:
    run.start_coordinators(4)
    start_grid(run, 2)
    secret = read_secret_file(run.secret_file)
    hanging = [Observer(run.addresses[0], secret) for _ in range(2 * MAX_OBSERVERS)]
    for observer in hanging:
        observer.send(Observe())  # and never reads
    flooding = Observer(run.addresses[0], secret)
    question = wire.encode(Observe())
    flood_until_closed(flooding._sock, question * 100_000)
    half = Observer(run.addresses[0], secret)
    half._sock.sendall(question[:7])
    for process in run.workers.values():
        assert process.event("commit", start=process.says())["epoch"] == 1
    found = seen(run)
    assert (found["epoch"], found["faults"], found["gone"]) == (1, [], [])
    for observer in [*hanging, flooding, half]:
        observer.close()
    assert [event for event in run.events() if event["event"] in ("fault", "revoke") and event["epoch"] > 1] == []


def test_observers_do_not_keep_a_coordinator_alive(run: Cluster) -> None:
    run.start_coordinators(2)
    start_grid(run, 1, iterations=200)
    observer = Observer(run.addresses[0], read_secret_file(run.secret_file))
    observer.ask()
    assert run.coordinators[0].exit_code() == 0
    assert observer.ask().kind == "stop"
    observer.close()
