"""The commands where they are used: in a pipe, in a narrow window, without UTF-8, of folders that are not there."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from recover_megatron.network import messages as wire
from recover_megatron.run_log.steps import not_shown
from recover_megatron.status.__main__ import main
from recover_megatron.tools.__main__ import main as tools
from tests.harness.processes import closed_port, finished, python
from tests.report.synthetic import steps, write_lines, write_run, write_steps

STATUS, REPORT, SUMMARY = "recover_megatron.status", "recover_megatron.report.full", "recover_megatron.report"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that has ended."""
    return write_run(tmp_path_factory.mktemp("ended") / "run")


def command(module: str, *arguments: object, **how: Any) -> tuple[int, str, str]:
    """Exit status, what it printed, what it complained of; from a folder of its own, without a terminal."""
    done = python("-m", module, *arguments, clean=True, cwd="/", **how)
    return done.returncode, done.stdout or "", done.stderr


@pytest.fixture
def closed_pipe() -> Iterator[int]:
    """A pipe that nobody reads any more: as behind `| head`."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@pytest.mark.parametrize("option", ["--once", "--json", "--check", "--watch"])
def test_recover_status_does_not_complain_of_a_reader_that_goes_away(run: Path, closed_pipe: int, option: str) -> None:
    assert command(STATUS, run, option, stdout=closed_pipe) == (0, "", "")


def test_a_reader_that_goes_away_changes_nothing_of_what_the_audit_says(
    run: Path, tmp_path: Path, closed_pipe: int
) -> None:
    assert command(REPORT, run, "--out", tmp_path / "page.html", stdout=closed_pipe) == (0, "", "")
    assert "AUDIT PASSED" in (tmp_path / "page.html").read_text()
    made = steps()
    broken = write_steps(tmp_path / "broken", [*made[:9], *made[10:]])
    code, _, told = command(SUMMARY, broken, "--no-plot", stdout=closed_pipe)
    assert (code, told) == (1, f"recover-report: {not_shown(10, 10)}\n")


def test_a_full_disk_behind_stdout_is_told_in_a_line(run: Path) -> None:
    with open("/dev/full", "wb") as full:
        code, _, told = command(STATUS, run, "--once", stdout=full.fileno())
        assert (code, told) == (1, "recover-status: error: [Errno 28] No space left on device\n")
        code, _, _ = command(STATUS, run, "--check", stdout=full.fileno())
        assert code == 3  # not 1, which would be a warning of the run
        code, _, told = command(SUMMARY, run, "--no-plot", stdout=full.fileno())
        assert (code, told) == (0, "recover-report: error: cannot write the summary: No space left on device\n")


@pytest.mark.parametrize("option", ["--once", "--json", "--check", "--watch"])
def test_a_closed_stdout_leaves_the_exit_code(run: Path, option: str) -> None:
    closed = f'exec "{sys.executable}" -m {STATUS} "{run}" {option} >&-'
    done = finished("sh", "-c", closed, clean=True, cwd="/")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_view_is_as_wide_as_columns_says(run: Path) -> None:
    code, told, complaints = command(STATUS, run, "--once", COLUMNS="60", NO_COLOR="1")
    assert (code, complaints) == (0, "")
    assert max(map(len, told.splitlines())) <= 60
    assert "all workers have left" in told
    assert "\x1b" not in told
    assert max(map(len, command(STATUS, run, "--once")[1].splitlines())) > 60


def test_where_there_are_only_ascii_characters_a_view_and_a_summary_are_shown_with_them(run: Path) -> None:
    ascii_only = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    for module, option in ((STATUS, "--once"), (SUMMARY, "--no-plot")):
        code, told, complaints = command(module, run, option, **ascii_only)
        assert (code, complaints) == (0, "")
        assert told.isascii()
        assert len(told.splitlines()) > 5


def test_a_folder_that_is_not_there_is_told_as_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path / "typo"), "--once"])
    assert ended.value.code == 2
    assert f"'{tmp_path / 'typo'}' is not HOST:PORT, and there is no such folder here" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--once", "--check"])
def test_a_run_of_another_version_is_said_to_be_one_and_not_to_be_over(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    older = wire.PROTOCOL_VERSION - 1
    monkeypatch.setenv("RECOVER_SECRET", "the secret of a test run")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            challenge = wire.Challenge(older, "00" * 32)
            with connection:
                connection.sendall(wire.encode(challenge, wire.MAX_HANDSHAKE))
                connection.recv(1)

        coordinator = threading.Thread(target=answer)
        coordinator.start()
        code = main([f"127.0.0.1:{server.getsockname()[1]}", option])
        coordinator.join()
    told = "".join(capsys.readouterr())
    assert code == (3 if option == "--check" else 1)
    assert f"has protocol version {older}, this program {wire.PROTOCOL_VERSION}: use the recover-status that" in told
    assert "the run is over" not in told


@pytest.fixture
def refusing() -> Iterator[int]:
    with closed_port() as port:
        yield port


def test_of_a_run_that_was_killed_as_a_whole_it_is_told_when_its_logs_ended(tmp_path: Path, refusing: int) -> None:
    write_steps(tmp_path, steps(7))
    listening = {"event": "listening", "time": 1.0, "mono": 1.0, "address": f"127.0.0.1:{refusing}", "world": 2}
    write_lines(tmp_path / "events-0.jsonl", [listening])
    for name in ("events-0.jsonl", "steps.jsonl"):
        os.utime(tmp_path / name, (time.time() - 7200, time.time() - 7200))
    secret = {"RECOVER_SECRET": "the secret of a test run"}
    code, _, told = command(STATUS, tmp_path, "--once", **secret)
    assert code == 1
    assert "Connection refused; its logs were last written 2.0 h ago, with iteration 7 as the last\n" in told
    code, told, _ = command(STATUS, tmp_path, "--check", **secret)
    assert code == 3
    assert told.startswith("UNKNOWN: no coordinator answers: ")
    assert told.endswith("2.0 h ago, with iteration 7 as the last\n")


def test_a_place_that_cannot_be_written_is_told_by_recover_tools(capsys: pytest.CaptureFixture[str]) -> None:
    assert tools(["copy", "slurm", "/proc/nowhere"]) == 2
    assert "recover-tools: error: /proc/nowhere/slurm cannot be written" in capsys.readouterr().err
