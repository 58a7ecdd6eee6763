"""What a process says on stderr: the text, at once, from a forked process, at the end, and where nobody can hear it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys

import pytest

from recover_megatron.logger import LINES_VARIABLE, get_logger
from tests.harness import REPOSITORY
from tests.harness.waiting import DEADLINE


def said_by(program: str, expected: int = 0, **options: object) -> str:
    """What ``program`` says on stderr; ``log`` is a logger in it."""
    head = "import os, sys\nfrom recover_megatron.logger import get_logger\nlog = get_logger('recover_megatron.x')\n"
    command = [sys.executable, "-W", "ignore", "-c", head + program]
    done = subprocess.run(
        command, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY, timeout=DEADLINE, check=False, **options
    )  # type: ignore[call-overload]
    assert done.returncode == expected, done.stderr
    return str(done.stderr)


@pytest.mark.parametrize(
    ("name", "prefix"),
    [
        ("recover_megatron.instep.recovery", "recover: "),
        ("recover_megatron.hostdevice", "[hostdevice] "),
        ("recover_megatron.launch.command", "recover-run: "),
    ],
)
def test_a_line_begins_with_who_says_it(capsys: pytest.CaptureFixture[str], name: str, prefix: str) -> None:
    get_logger(name).info("worker 3 takes 100 % of it")
    get_logger(name).warning("the disk is full")
    assert capsys.readouterr().err == f"{prefix}worker 3 takes 100 % of it\n{prefix}warning: the disk is full\n"


def test_a_process_beside_a_launcher_writes_lines_of_the_form_that_was_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LINES_VARIABLE, "json node-0")
    get_logger("recover_megatron.membership.server").warning("it's \u2018full\u2019")
    told = json.loads(capsys.readouterr().err)
    assert told.pop("time").endswith("Z")
    text = "recover: warning: it's \u2018full\u2019"
    assert told == {"node": "node-0", "worker": "-", "stream": "stderr", "text": text}
    monkeypatch.setenv(LINES_VARIABLE, "iso node-0")
    get_logger("recover_megatron.membership.server").info("said")
    assert capsys.readouterr().err.endswith("Z node-0 worker -: recover: said\n")


def test_the_root_loggers_level_and_handlers_change_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.CRITICAL)
    try:
        get_logger("recover_megatron.instep.recovery").info("told")
    finally:
        root.setLevel(level)
    assert capsys.readouterr().err == "recover: told\n"


def test_what_was_said_is_out_before_a_sudden_end() -> None:
    assert said_by("log.info('last'); os._exit(7)", expected=7) == "recover: last\n"
    assert said_by("log.info('last'); os.kill(os.getpid(), 9)", expected=-9) == "recover: last\n"


def test_a_forked_process_says_it_too_also_while_another_thread_speaks() -> None:
    told = said_by(
        "import threading\n"
        "over = threading.Event()\n"
        "def speak():\n"
        "    while not over.is_set(): log.info('busy')\n"
        "thread = threading.Thread(target=speak); thread.start()\n"
        "for n in range(50):\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        log.info(f'child {n}'); os._exit(0)\n"
        "    os.waitpid(pid, 0)\n"
        "over.set(); thread.join()"
    )
    lines = told.splitlines()
    assert set(lines) == {"recover: busy", *(f"recover: child {n}" for n in range(50))}


def test_it_is_said_at_the_interpreters_exit() -> None:
    assert said_by("import atexit; atexit.register(log.info, 'the end')") == "recover: the end\n"


@pytest.mark.parametrize(
    "how", ["os.close(2)", "sys.stderr.close()", "sys.stderr = None", "os.dup2(os.open('/dev/full', os.O_WRONLY), 2)"]
)
def test_a_stderr_that_is_gone_or_full_ends_nothing(how: str) -> None:
    program = f"{how}\nfor _ in range(3): log.info('x' * 9000)\nos.write(1, b'went on')"
    done = said_by(program, stdout=(reading := os.pipe())[1])
    os.close(reading[1])
    with open(reading[0], "rb") as output:
        assert output.read() == b"went on"
    assert done == ""


def test_a_reader_that_has_gone_ends_nothing() -> None:
    program = "read, write = os.pipe(); os.close(read); os.dup2(write, 2)\nlog.info('nobody hears it')"
    assert said_by(program) == ""
