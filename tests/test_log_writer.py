"""Files for people: whatever the disk does, nobody waits for it, and what it takes again goes on whole."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from recover_megatron import log_writer
from recover_megatron.log_writer import BackgroundWriter, LogWriter
from recover_megatron.logger import LINES_VARIABLE, get_logger
from tests.harness import REPOSITORY
from tests.harness.processes import python
from tests.harness.waiting import DEADLINE, eventually

LINE = b"x" * 99 + b"\n"


def read_all(pipe: int) -> bytes:
    data = b""
    while block := os.read(pipe, 1 << 16):
        data += block
    return data


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_writer, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(log_writer, "STALL_SECONDS", DEADLINE)  # a busy machine is no disk that blocks


def gap(lines: int) -> bytes:
    return f"dropped {lines}\n".encode()


class Disk:
    """Opens a file in which at most ``room`` bytes fit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        self.room = room
        self._write = os.write
        monkeypatch.setattr(os, "write", self.write)

    def write(self, descriptor: int, data: bytes) -> int:
        if not os.readlink(f"/proc/self/fd/{descriptor}").endswith("/log"):
            return self._write(descriptor, data)
        if not self.room:
            raise OSError(28, "No space left on device")
        written = self._write(descriptor, data[: self.room])
        self.room -= written
        return written


def test_lines_are_on_the_disk_when_it_is_well(tmp_path: Path) -> None:
    said: list[str] = []
    file = LogWriter(tmp_path / "new" / "log", said.append)
    for _ in range(3):
        file.put(LINE)
    assert file.flush(DEADLINE)
    assert (tmp_path / "new" / "log").read_bytes() == 3 * LINE
    assert said == []


def test_a_full_disk_is_told_of_once_and_the_file_goes_on_whole_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch, room=250)
    said: list[str] = []
    file = LogWriter(tmp_path / "log", said.append, gap=gap, most_bytes=500)
    for _ in range(5):
        file.put(LINE)
    assert not file.flush()  # two lines and a half are in the file
    for _ in range(4):
        file.put(LINE)  # two have room in the queue
    assert not file.flush()
    assert said == [f"{tmp_path}/log cannot be written (No space left on device); the run continues without this file"]
    disk.room = 10**6
    assert file.flush(DEADLINE)
    file.put(LINE)
    assert file.flush(DEADLINE)
    assert (tmp_path / "log").read_bytes() == 7 * LINE + gap(2) + LINE
    eventually(lambda: len(said) == 2, "the end of the trouble")
    assert said[1] == f"{tmp_path}/log is written again; 2 lines were dropped"


@pytest.mark.parametrize("trouble", ["a folder in its place", "a folder that is a file", "/dev/full", "no permission"])
def test_a_file_that_cannot_be_opened_or_written_costs_a_warning(tmp_path: Path, trouble: str) -> None:
    path = tmp_path / "folder" / "log"
    if trouble == "a folder in its place":
        path.mkdir(parents=True)
    elif trouble == "a folder that is a file":
        path.parent.write_text("")
    elif trouble == "/dev/full":
        path = Path(trouble)
    else:
        path = Path("/proc/self/log")  # not even for root
    said: list[str] = []
    file = LogWriter(path, said.append)
    file.put(LINE)
    assert not file.flush()
    file.put(LINE)
    assert not file.flush()
    eventually(lambda: said, "a warning")
    assert len(said) == 1
    assert str(path) in said[0]


def test_a_folder_that_was_removed_is_made_again(tmp_path: Path) -> None:
    file = LogWriter(tmp_path / "folder" / "log", pytest.fail)
    file.put(LINE)
    assert file.flush(DEADLINE)
    (tmp_path / "folder" / "log").unlink()
    (tmp_path / "folder").rmdir()
    file.put(LINE)
    assert file.flush(DEADLINE)
    assert (tmp_path / "folder" / "log").read_bytes() == LINE


@pytest.mark.parametrize("create", [False, True], ids=["moved", "moved, and made anew"])
def test_after_a_log_rotation_lines_go_to_the_file_at_the_path(tmp_path: Path, create: bool) -> None:
    path = tmp_path / "log"
    file = LogWriter(path, pytest.fail)
    file.put(LINE)
    assert file.flush(DEADLINE)
    path.rename(tmp_path / "log.1")
    if create:
        path.touch()
    file.put(LINE)
    file.put(LINE)
    assert file.flush(DEADLINE)
    assert (tmp_path / "log.1").read_bytes() == LINE
    assert path.read_bytes() == 2 * LINE


@pytest.mark.parametrize("quiet", [False, True], ids=["with the next line", "without a line"])
@pytest.mark.parametrize("how", ["emptied", "moved", "moved, and made anew"])
def test_what_readers_need_is_written_again_after_a_log_rotation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, quiet: bool
) -> None:
    monkeypatch.setattr(log_writer, "LOOK_SECONDS", 0.01 if quiet else DEADLINE)
    path = tmp_path / "log"
    path.write_bytes(LINE)  # of a launch before
    file = LogWriter(path, pytest.fail)
    file.head = b"head\n"
    for _ in range(2):
        file.put(LINE)
    assert file.flush(DEADLINE)
    assert path.read_bytes() == 3 * LINE
    for _ in range(2):
        if how == "emptied":
            os.truncate(path, 0)
        else:
            path.rename(tmp_path / "log.1")
            if how != "moved":
                path.touch()
        if quiet:
            eventually(lambda: path.exists() and path.read_bytes() == b"head\n")
        else:
            file.put(LINE)
            assert file.flush(DEADLINE)
            assert path.read_bytes() == b"head\n" + LINE
    file.put(LINE)
    assert file.flush(DEADLINE)
    assert path.read_bytes() == b"head\n" + (1 if quiet else 2) * LINE


def test_no_head_is_repeated_where_there_is_no_file(tmp_path: Path) -> None:
    """A coordinator without --events writes to stderr, which may be a pipe."""
    reader, writer = os.pipe()
    file = LogWriter(tmp_path / "log", pytest.fail, opening=lambda _: os.dup(writer))
    file.head = b"head\n"
    for _ in range(3):
        file.put(LINE)
    assert file.flush(DEADLINE)
    file.close()
    eventually(lambda: file.finished)
    os.close(writer)
    assert read_all(reader) == 3 * LINE
    os.close(reader)


def test_a_file_that_is_closed_gets_its_last_lines_though_another_has_taken_its_place(tmp_path: Path) -> None:
    path = tmp_path / "log"
    gate = threading.Event()
    file = LogWriter(path, pytest.fail)
    file.put(LINE)
    assert file.flush(DEADLINE)
    file.put(LINE, wanted=lambda: gate.wait(DEADLINE))
    file.put(LINE)
    file.close()
    path.rename(tmp_path / "log.1")
    path.touch()
    gate.set()
    eventually(lambda: file.finished)
    assert (tmp_path / "log.1").read_bytes() == 3 * LINE
    assert path.read_bytes() == b""


def test_a_program_that_goes_to_another_folder_takes_no_file_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    file = LogWriter(Path("log"), pytest.fail)
    file.put(LINE)
    assert file.flush(DEADLINE)
    monkeypatch.chdir(tmp_path / "elsewhere")
    file.put(LINE)
    assert file.flush(DEADLINE)
    assert (tmp_path / "log").read_bytes() == 2 * LINE


def test_a_line_that_was_cut_gets_its_end_before_the_next(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(LINE + b"cut")
    file = LogWriter(tmp_path / "log", pytest.fail)
    file.put(LINE)
    assert file.flush(DEADLINE)
    assert (tmp_path / "log").read_bytes() == LINE + b"cut\n" + LINE


def test_a_disk_that_blocks_stops_nobody_and_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_writer, "STALL_SECONDS", 0.0)
    pipe = tmp_path / "log"
    os.mkfifo(pipe)
    said: list[str] = []
    file = LogWriter(pipe, said.append, gap=gap, most_bytes=1 << 20)
    for _ in range(20_000):  # two megabytes: one in the queue, 64 KiB in the pipe, which nobody reads
        file.put(LINE)
        file.wait_done()
    assert not file.flush(0.2)
    assert len(said) == 1
    assert "could not be written" in said[0]
    reader = os.open(pipe, os.O_RDONLY)
    file.close()
    lines = read_all(reader).splitlines(keepends=True)
    assert len(lines) > 10_000
    assert set(lines) == {LINE}
    eventually(lambda: len(said) == 2, "the end of the trouble")
    assert f"{20_000 - len(lines)} lines were dropped" in said[1]


def test_a_process_ends_though_its_disk_blocks(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log")
    program = (
        "import sys, pathlib\n"
        "from recover_megatron.log_writer import LogWriter\n"
        "file = LogWriter(pathlib.Path(sys.argv[1]))\n"
        "for _ in range(2000): file.put(b'x' * 99 + b'\\n')\n"
        "assert not file.flush(0.2)\n"
        "file.close()\n"
    )
    assert python("-c", program, tmp_path / "log").returncode == 0


def test_what_was_given_up_is_not_written_later(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log")
    file = LogWriter(tmp_path / "log")
    file.put(b"y" * (1 << 17) + b"\n")  # more than the pipe takes
    file.put(LINE)
    file.discard()
    reader = os.open(tmp_path / "log", os.O_RDONLY)
    file.close()
    assert read_all(reader) == b"y" * (1 << 17) + b"\n"


def test_a_closed_aside_gives_up_what_the_disk_refuses() -> None:
    def refused() -> None:
        raise OSError(28, "No space left on device")

    said: list[str] = []
    aside = BackgroundWriter("it", said.append)
    aside.submit(refused, 1)
    assert not aside.flush()
    aside.close()
    eventually(lambda: aside.left == 0, "the end of the thread")
    assert said == ["it cannot be written (No space left on device); the run continues without this file"]


def test_a_writer_that_had_nothing_to_do_for_long_is_not_taken_for_a_disk_that_blocks() -> None:
    said: list[str] = []
    aside = BackgroundWriter("it", said.append)
    aside.submit(lambda: None, 1)
    assert aside.flush(DEADLINE)
    aside._since -= 10 * log_writer.STALL_SECONDS  # so long ago
    with aside._changed:  # the thread cannot begin between the two
        aside.submit(lambda: None, 1)
        aside.submit(lambda: None, 1)
    assert aside.flush(DEADLINE)
    aside.close()
    assert said == []


def test_where_no_thread_can_be_started_lines_wait_in_memory_and_are_written_when_one_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    file = LogWriter(tmp_path / "log", said.append)
    with monkeypatch.context() as no_more:
        no_more.setattr(threading.Thread, "start", no_thread)
        file.make()
        file.put(LINE)
        file.wait_done()
    assert len(said) == 1
    assert "no thread can be started" in said[0]
    assert not (tmp_path / "log").exists()
    assert file.flush()
    assert (tmp_path / "log").read_bytes() == LINE
    file.close()


def no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


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
    get_logger("recover_megatron.membership.io.server").warning("it's \u2018full\u2019")
    told = json.loads(capsys.readouterr().err)
    assert told.pop("time").endswith("Z")
    text = "recover: warning: it's \u2018full\u2019"
    assert told == {"node": "node-0", "worker": "-", "stream": "stderr", "text": text}
    monkeypatch.setenv(LINES_VARIABLE, "iso node-0")
    get_logger("recover_megatron.membership.io.server").info("said")
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
