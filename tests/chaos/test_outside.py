"""Chaos from outside: real jobs of recover-run, real signals, and never a process that is not a worker of the run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recover_megatron.chaos.__main__ import Victims, draws, hold, main
from recover_megatron.run_log.events import Event, read_events
from tests.harness import REPOSITORY
from tests.harness.processes import alive
from tests.harness.waiting import DEADLINE, eventually
from tests.launch.conftest import UNTIL_TOLD, Bench, bench

__all__ = ["bench"]  # a fixture


def chaos(log_dir: Path, *options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "recover_megatron.chaos", "--log-dir", str(log_dir), *map(str, options)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def told(log_dir: Path, name: str = "strike") -> list[Event]:
    return [event for event in read_events(log_dir / "chaos.jsonl") if event["event"] == name]


def test_it_kills_as_many_as_it_may_and_ends_with_the_run(bench: Bench) -> None:
    launch = bench.up(4, bench.script(UNTIL_TOLD))
    killer = chaos(bench.folder / "logs", "--mtbf", 0.05, "--seed", 3, "--max-kills", 2)
    launch.wait_for("was killed by SIGKILL", times=2)
    assert killer.poll() is None, "it must see the run's end"
    bench.go()
    assert launch.wait() == 137
    out, err = killer.communicate(timeout=DEADLINE)
    assert (killer.returncode, err) == (0, "")
    assert "chaos: the run has ended after 2 strikes" in out
    recorded = told(bench.folder / "logs")
    killed = {w["worker_id"]: w for w in bench.workers() if w["state"] == "killed"}
    assert [killed[strike["worker"]]["pid"] for strike in recorded] == [strike["pid"] for strike in recorded]
    assert len(killed) == len(recorded) == 2
    for strike in recorded:
        assert killed[strike["worker"]]["signal"] == signal.SIGKILL
        assert 0 <= killed[strike["worker"]]["ended"] - strike["time"] < DEADLINE
        assert strike["kind"] == "kill"


def test_it_leaves_as_many_alone_as_it_was_told_and_ends_when_the_launcher_is_killed(bench: Bench) -> None:
    launch = bench.up(3, bench.script(UNTIL_TOLD))
    killer = chaos(bench.folder / "logs", "--mtbf", 0.02, "--seed", 1, "--keep", 2)
    eventually(lambda: told(bench.folder / "logs", "kept"), "a strike that was not made")
    # A process that is killed lives on until its host runs it once more.
    eventually(lambda: sum(alive(worker["pid"]) for worker in bench.workers()) == 2, "the end of who was struck")
    assert len(told(bench.folder / "logs")) == 1
    launch.send(signal.SIGKILL)  # workers.json stays as it is: it still calls the workers running
    killer.communicate(timeout=DEADLINE)
    assert killer.returncode == 0


def test_a_stopped_worker_is_struck_once_and_counts_as_one_that_is_gone(bench: Bench) -> None:
    launch = bench.up(2, bench.script(UNTIL_TOLD))
    killer = chaos(bench.folder / "logs", "--mtbf", 0.02, "--seed", 1, "--kinds", "stop")
    eventually(lambda: told(bench.folder / "logs", "kept"), "a strike that was not made")
    (strike,) = told(bench.folder / "logs")
    stat = Path(f"/proc/{strike['pid']}/stat")
    eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "it is stopped")
    os.kill(strike["pid"], signal.SIGCONT)
    bench.go()
    assert launch.wait() == 0
    killer.communicate(timeout=DEADLINE)
    assert killer.returncode == 0


@contextmanager
def sleeping(**options: bool) -> Iterator[subprocess.Popen[bytes]]:
    """An innocent process."""
    process = subprocess.Popen(["sleep", "1000"], **options)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def bystander(tmp_path: Path, **entry: object) -> Iterator[subprocess.Popen[bytes]]:
    """One that leads a session, whose pid workers.json gives to a worker that started ``started``."""
    with sleeping(start_new_session=True) as process:
        worker = {"worker_id": 0, "pid": process.pid, "host": os.uname().nodename, "state": "running", **entry}
        (tmp_path / "workers.json").write_text(json.dumps([{"started": time.time(), **worker}]))
        yield process


@pytest.mark.parametrize(
    ("entry", "held"),
    [
        ({}, 1),
        ({"started": time.time() - 3600}, 0),  # what a recycled pid looks like
        ({"started": None}, 0),
        ({"state": "killed"}, 0),
        ({"host": "elsewhere"}, 0),
    ],
)
def test_a_recycled_pid_is_never_held(tmp_path: Path, entry: dict[str, object], held: int) -> None:
    with bystander(tmp_path, **entry):
        victims = Victims(tmp_path)
        assert len(victims.live()) == held
        victims.close()


def test_a_process_that_leads_no_session_is_no_worker() -> None:
    with sleeping() as process:
        assert hold(process.pid, time.time()) is None
    assert hold(process.pid, time.time()) is None


def test_a_held_worker_that_ended_is_neither_hit_nor_listed(tmp_path: Path) -> None:
    with bystander(tmp_path):
        victims = Victims(tmp_path)
        held = victims.live()[0]
        assert held.alive()
    assert not held.send(signal.SIGSTOP)
    assert victims.live() == {}


def test_nobody_is_killed_where_no_worker_lives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with bystander(tmp_path, started=1.0) as process:
        assert main(["--log-dir", str(tmp_path), "--mtbf", "0.001", "--seed", "1", "--wait", "0"]) == 1
        assert "no live worker of a run" in capsys.readouterr().err
        assert process.poll() is None
    (tmp_path / "workers.json").write_text("{")
    assert main(["--log-dir", str(tmp_path), "--mtbf", "1", "--seed", "1"]) == 2
    assert "is not a valid list of workers" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options", [["--mtbf", "0"], ["--mtbf", "nan"], ["--kinds", "kill,hug"], ["--keep", "-1"], ["--log-dir", "/none"]]
)
def test_nonsense_is_refused(tmp_path: Path, options: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--log-dir", str(tmp_path), "--mtbf", "1", "--seed", "1", *options])
    assert caught.value.code == 2


@given(st.integers(), st.floats(0.1, 1000))
def test_the_seed_alone_decides_the_sequence(seed: int, mtbf: float) -> None:
    first, again = (list(islice(draws(seed, mtbf, ["kill", "stop"]), 50)) for _ in range(2))
    assert first == again
    assert [d.lot for d in islice(draws(seed, mtbf * 2, ["kill"]), 50)] == [d.lot for d in first]


def test_the_sequence_is_exponential_and_fair() -> None:
    sample = list(islice(draws(7, 30.0, ["kill", "stop"]), 20_000))
    assert sum(d.after for d in sample) / len(sample) == pytest.approx(30, rel=0.03)
    longer = sum(d.after > 60 for d in sample) / len(sample)
    assert longer == pytest.approx(0.1353, abs=0.01)  # exp(-2)
    victims = Counter(d.victim([4, 2, 9, 7]) for d in sample)
    assert set(victims) == {2, 4, 7, 9}
    assert min(victims.values()) > 4_700
    assert Counter(d.kind for d in sample)["stop"] == pytest.approx(10_000, rel=0.05)
