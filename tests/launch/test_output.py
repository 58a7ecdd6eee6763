"""What workers write: shown with a prefix, line by line; kept as it came."""

import contextlib
import json
import os
import re
import signal
import subprocess
from collections import Counter

import pytest

from recover_megatron.launch import messages
from recover_megatron.launch.workers.output import MOST_PENDING, ConsoleFilter, Sink
from recover_megatron.launch.workers.reaper import MISSED, StandIn, beat
from recover_megatron.launch.workers.states import WorkerProcess, WorkerState
from tests.harness import REPOSITORY
from tests.harness.waiting import DEADLINE, eventually

from .conftest import recover_run


def test_lines_are_prefixed_on_the_stream_they_came_from_and_kept_unprefixed(bench):
    script = bench.script(
        """
        import os, sys
        print("to stdout", os.environ["RANK"])
        print("to stderr", os.environ["RANK"], file=sys.stderr)
        """
    )
    launch = bench.run("--nproc-per-node", 2, "--log-dir", "logs", script)
    for rank in "01":
        assert f"[{rank}] to stdout {rank}\n" in launch.out
        assert f"[{rank}] to stderr {rank}\n" in launch.err
        assert sorted(bench.log(int(rank)).splitlines()) == [f"to stderr {rank}", f"to stdout {rank}"]


@pytest.mark.slow
def test_prefixes_are_aligned(bench):
    launch = bench.run("--nproc-per-node", 11, bench.script("import os; print('x' + os.environ['RANK'])"))
    assert "[3]  x3\n" in launch.out
    assert "[10] x10\n" in launch.out


@pytest.mark.slow
def test_both_streams_are_logged_in_order_of_arrival(bench):
    script = bench.script(
        """
        import os, sys, time
        for number in range(4):
            print("line", number, file=sys.stderr if number % 2 else sys.stdout)
            while not os.path.exists(f"go{number}"):  # between two pipes there is no order but that of arrival
                time.sleep(0.01)
        """
    )
    launch = bench.start("--log-dir", "logs", script)
    for number in range(4):
        launch.wait_for(f"line {number}")
        bench.go(f"go{number}")
    assert launch.wait() == 0
    assert bench.log() == "".join(f"line {number}\n" for number in range(4))


def test_lines_of_different_workers_are_never_mixed(bench):
    script = bench.script(
        """
        import os, random, time
        line = (os.environ["RANK"] * 997 + "\\n").encode() * 50
        while line:  # in pieces that end anywhere
            size = random.randint(1, 5000)
            os.write(1, line[:size])
            line = line[size:]
            time.sleep(0.001)
        """
    )
    launch = bench.run("--nproc-per-node", 3, script)
    digits: Counter[str] = Counter()
    for line in launch.out.splitlines():
        match = re.fullmatch(r"\[(\d)\] \1{1,997}", line)  # shorter where a worker had no processor for half a second
        assert match, line
        digits[match[1]] += len(line) - len("[0] ")
    assert digits == {rank: 50 * 997 for rank in "012"}


@pytest.mark.slow
def test_a_line_without_an_end_is_shown_before_its_worker_goes_on(bench):
    """A progress bar: the launcher must show it though no newline comes."""
    script = bench.script(
        """
        import os, sys, time
        sys.stdout.write("\\r10 %\\r20 %")
        sys.stdout.flush()
        while not os.path.exists("go"):
            time.sleep(0.05)
        sys.stdout.write("\\r100 %\\n")
        """
    )
    launch = bench.start("--log-dir", "logs", script)
    launch.wait_for("[0] 20 %\n")
    bench.go()
    assert launch.wait() == 0
    assert launch.out.splitlines() == ["[0] 20 %", "[0] 100 %"]
    assert (bench.folder / "logs/worker-0.log").read_bytes() == b"\r10 %\r20 %\r100 %\n"


def test_a_very_long_line_passes_in_pieces(bench):
    script = bench.script(
        """
        import os
        for _ in range(8):
            os.write(1, b"x" * 2**20)
        os.write(1, b"\\nend\\n")
        """
    )

    launch = bench.run("--log-dir", "logs", script)
    assert launch.out.count("x") == 8 * 2**20
    assert "[0] end\n" in launch.out
    assert max(map(len, launch.out.splitlines())) < 100_000
    assert (bench.folder / "logs/worker-0.log").stat().st_size == 8 * 2**20 + 5


def test_undecodable_bytes_pass(bench):
    script = bench.script(r"import os; os.write(1, b'\xff\xfe\x00 \xc3\n'); os.write(1, b'no newline \xe9')")
    launch = bench.run("--log-dir", "logs", script)
    assert launch.bytes_out == b"[0] \xff\xfe\x00 \xc3\n[0] no newline \xe9\n"
    assert (bench.folder / "logs/worker-0.log").read_bytes() == b"\xff\xfe\x00 \xc3\nno newline \xe9"


NOTES_AN_ORDER = """
    import os, pathlib, time
    from recover_megatron import log_writer

    log_writer.PATIENCE_SECONDS = 60.0  # a launcher does not wait longer for workers.json where the disk is slow

    read, replace, spawn = os.read, os.replace, os.posix_spawn

    def note(what):
        with open("order", "a") as order:
            print(what, file=order)

    def read_and_noted(descriptor, size):
        data = read(descriptor, size)
        if b"UP" in data:
            note("output")
        return data

    def replaced_and_noted(old, new):
        if pathlib.Path(new).name == "workers.json" and '"running"' in pathlib.Path(old).read_text():
            note("named")
        replace(old, new)

    def spawned(path, command, environment, **options):
        pid = spawn(path, command, environment, **options)
        while "RECOVER_WORKER_ID" in environment and not os.path.exists("printed"):
            time.sleep(0.01)
        return pid

    os.read, os.replace, os.posix_spawn = read_and_noted, replaced_and_noted, spawned
    """


@pytest.mark.slow
def test_a_worker_is_named_in_workers_json_before_the_launcher_reads_what_it_has_printed(bench):
    """Here the worker has printed before the launcher goes on after its start."""
    bench.script(NOTES_AN_ORDER, "sitecustomize.py")
    script = bench.script("print('UP', flush=True); open('printed', 'w').close()")
    bench.run("--log-dir", "logs", script, environment={"PYTHONPATH": f"{bench.folder}:{REPOSITORY}"})
    order = (bench.folder / "order").read_text().split()
    assert order.index("named") < order.index("output")


def test_the_last_words_of_a_killed_worker_are_shown(bench):
    script = bench.script("import os, signal; os.write(1, b'last words'); os.kill(os.getpid(), signal.SIGKILL)")
    launch = bench.run(script, ends=137)
    assert "[0] last words\n" in launch.out


@pytest.mark.slow
def test_the_log_of_an_earlier_run_is_kept(bench):
    script = bench.script("import sys; print(sys.argv[1])")
    bench.run("--log-dir", "logs", script, "first")
    bench.run("--log-dir", "logs", script, "second")
    assert bench.log() == "second\n"
    assert (bench.folder / "logs/worker-0.log.old").read_text() == "first\n"


def test_no_colour_when_the_output_is_no_terminal(bench):
    assert "\x1b" not in bench.run(bench.script("print('plain')")).out


def read_until(descriptor: int, words: bytes) -> bytes:
    shown = b""
    while words not in shown:
        shown += os.read(descriptor, 65536)
    return shown


@contextlib.contextmanager
def shown_on(kind, bench, argv, environment, **streams):
    """A launch whose output goes to a terminal, or else a pipe, and the end of that to read from; it ends well."""
    read, write = os.openpty() if kind == "terminal" else os.pipe()
    launch = recover_run(argv, bench.folder, environment, **{"stdout": write, "stderr": write, **streams})
    os.close(write)
    try:
        yield read
        assert launch.wait(DEADLINE) == 0
    finally:
        launch.kill()
        launch.wait()
        os.close(read)


def test_colour_on_a_terminal(bench, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    with shown_on("terminal", bench, [bench.script("print('colourful')")], {}) as terminal:
        shown = read_until(terminal, b"exit code 0")
    assert re.search(rb"\x1b\[\d+m\[0\]\x1b\[0m colourful", shown)


def test_a_reader_that_went_away_does_not_end_the_run(bench):
    script = bench.script(
        """
        import os, time
        print("one")
        while not os.path.exists("go"):
            time.sleep(0.05)
        for _ in range(1000):
            print("more" * 100)
        """
    )
    launch = bench.start("--log-dir", "logs", script)
    launch.wait_for("one")
    # The reading thread holds the pipe: closing it under the thread is a race, so give it another file instead.
    os.dup2(os.open(os.devnull, os.O_RDONLY), launch.process.stdout.fileno())
    bench.go()
    assert launch.wait() == 0
    assert bench.log().count("\n") == 1001


LINES, SIZE = 8_000, 1000
TALKATIVE = f"""
    import os, time
    for number in range({LINES}):
        os.write({{stream}}, (str(number) + " " + "x" * {SIZE}).encode() + b"\\n")
    open("written", "w").close()
    while not os.path.exists("go"):
        time.sleep(0.05)
    os.write({{stream}}, b"the end\\n")
    """


@pytest.mark.slow
@pytest.mark.parametrize("stream", [1, 2])
@pytest.mark.parametrize("kind", ["pipe", "terminal"])
def test_a_reader_that_does_not_read_stops_nobody_and_is_told_what_it_has_missed(bench, kind, stream):
    """8 MB go to the log while nobody reads; then it is read again."""
    argv = ["--log-dir", "logs", bench.script(TALKATIVE.format(stream=stream))]
    with shown_on(kind, bench, argv, {"NO_COLOR": "1"}) as read:
        eventually((bench.folder / "written").exists, "the worker goes on")
        shown = read_until(read, b"lines are missing here")
        bench.go()
        shown += read_until(read, b"exit code 0")
    assert [line.split()[0] for line in bench.log().splitlines()] == [*map(str, range(LINES)), "the"]
    lines = [line.strip() for line in shown.decode().splitlines()]
    kept = [int(line.split()[1]) for line in lines if line.startswith("[0]") and "x" in line]
    missing = [int(n) for n in re.findall(r"recover-run: (\d+) lines are missing here", shown.decode())]
    assert sum(missing) + len(kept) == LINES
    assert str(bench.folder / "logs") in shown.decode()
    assert kept == sorted(kept)
    assert "[0] the end" in lines


def test_what_waits_for_a_reader_is_bounded_and_a_closed_pipe_takes_nothing():
    read, write = os.pipe()
    rooms = []
    sink = Sink(write, lambda: rooms.append(True), lambda lines: b"%d missing\n" % lines)
    for _ in range(100):
        sink.put((b"x" * 999 + b"\n") * 1000)
    assert sink.full is False  # it drops
    assert sink._size <= 2 * MOST_PENDING + 1_000_000
    shown = read_until(read, b"missing\n")
    assert shown.count(b"x\n") + int(shown.split()[-2]) == 100_000
    assert rooms
    os.close(read)
    sink.put(b"nobody reads this\n" * 100_000)
    eventually(lambda: sink.empty, "the pipe was found closed")
    os.close(write)


def test_while_the_launcher_does_not_run_its_stand_in_keeps_every_pipe_from_being_full():
    pulse, (read, write) = os.memfd_create("pulse"), os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)  # what would block raises
    stand_in = StandIn(pulse)
    stand_in.add(7, [read])

    def fill() -> int:
        """Until it is full; how many lines it takes."""
        lines = 0
        with contextlib.suppress(BlockingIOError):
            while os.write(write, b"x" * 2048 + b"\n"):  # of which a page takes one
                lines += 1
        return lines

    taken = fill()
    for _ in range(3 * MISSED):
        beat(pulse)
        assert list(stand_in.look()) == []
    assert fill() == 0, "a launcher that runs reads for itself"
    for _ in range(MISSED):
        assert list(stand_in.look()) == []
    for _ in range(3):
        more = fill()
        assert more > 0
        taken += more
        assert list(stand_in.look()) == []
    beat(pulse)
    ((session, dropped),) = stand_in.look()
    assert (session, dropped + os.read(read, 1 << 20).count(b"\n")) == (7, taken)
    assert list(stand_in.look()) == []
    stand_in.remove(7)
    os.close(write)


@pytest.mark.slow
def test_output_blocks_no_worker_while_the_launcher_is_stopped(bench):
    # Of one length: what is left of a line of which the reaper has dropped the beginning is none of them.
    numbered = TALKATIVE.format(stream=1).replace("str(number)", "str(number).zfill(6)")
    launch = bench.start("--log-dir", "logs", bench.script(numbered))
    launch.wait_for("[0] 000000 x")
    launch.send(signal.SIGSTOP)
    eventually((bench.folder / "written").exists, "the worker goes on")
    launch.send(signal.SIGCONT)
    launch.wait_for("lines of worker 0 are missing here, because this launcher was stopped")
    bench.go()
    assert launch.wait() == 0
    log = bench.log()
    missing = re.findall(r"recover-run: (\d+) lines of worker 0 are missing here", log)
    kept = [int(number) for number in re.findall(rf"^(\d{{6}}) x{{{SIZE}}}$", log, re.MULTILINE)]
    assert kept == sorted(kept)
    assert len(missing) == 1
    assert LINES - 2 <= len(kept) + int(missing[0]) <= LINES  # two may be cut
    assert log.endswith("the end\n")


@pytest.mark.slow
def test_a_reader_that_never_comes_back_does_not_keep_the_launcher(bench):
    bench.go()
    argv = ["--log-dir", "logs", bench.script(TALKATIVE.format(stream=1))]
    with shown_on("pipe", bench, argv, {}, stderr=subprocess.DEVNULL):
        pass
    assert bench.log().count("\n") == LINES + 1


@pytest.mark.slow
def test_logs_that_cannot_be_written_are_told_of_once_and_go_on_when_they_can(bench):
    """The launcher may write no file of more than 50 bytes for a while: as good as a full disk."""
    script = bench.script(
        """
        import os, resource, sys, time
        def limit_launcher(size):
            resource.prlimit(os.getppid(), resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        limit_launcher(50)
        for number in range(100):
            print("line", number, "x" * 50)
        print("now", flush=True)
        while not os.path.exists("go"):
            time.sleep(0.01)
        if sys.argv[1] == "room":
            limit_launcher(resource.RLIM_INFINITY)
        while not os.path.exists("end"):
            time.sleep(0.01)
        """
    )
    for room in ("room", "none"):
        launch = bench.start("--log-dir", room, script, room)
        launch.wait_for("now")
        launch.wait_for(f"{room}/worker-0.log cannot be written (File too large); the run continues without this file")
        bench.go()
        if room == "room":
            launch.wait_for(f"{room}/worker-0.log is written again; nothing was lost")
        bench.go("end")
        assert launch.wait() == 0
        assert launch.out.count("x" * 50) == 100
        assert launch.err.count("worker-0.log cannot be written") == 1
        # It changes at the end, and may still be on its way when the limit begins.
        assert launch.err.count("workers.json cannot be written") in ({0, 1} if room == "room" else {1})
        (bench.folder / "go").unlink()
        (bench.folder / "end").unlink()
    assert bench.log(folder="room") == "".join(f"line {number} {'x' * 50}\n" for number in range(100)) + "now\n"
    assert bench.workers("room")[0]["state"] == "finished"


def test_the_last_line_counts_no_newcomer_that_came_too_late_and_names_what_the_kernel_has_killed():
    workers = [WorkerProcess(n, 100 + n, "h", WorkerState.RUNNING, 0, n, started=10.0) for n in range(4)]
    for worker, status in zip(workers, (0, 0, -9, -9), strict=True):
        worker.end(status, 20.0)
    workers[2].kernel, workers[3].note = "out of memory", messages.TOO_LATE
    killed = "killed by SIGKILL (signal 9), according to the kernel out of memory, after 10.0 s"
    late = "1 worker more, started as replacements, had not joined the run yet"
    assert messages.ends(workers) == f"2 of 3 workers finished; worker 2 {killed}; {late}"
    assert workers[2].how == "SIGKILL, out of memory"
    assert f"worker 2 on h (pid 102) was {killed}; no worker is left" in messages.worker_ended(
        workers[2], 0, 0, None, 0
    )


def test_a_newcomer_is_heard_on_the_console_with_its_own_lines_until_it_has_a_place():
    voice = ConsoleFilter(newcomer=True)
    lines = [
        b"using world size: 8", b"recover: worker 9 waits for a place", b"iteration  7/",
        b"recover: worker 9 takes position 0 of replica 1 from iteration 8 on: ...", b"iteration  8/",
    ]  # fmt: skip
    assert [voice.is_shown(line) for line in lines] == [False, True, False, True, True]
    assert ConsoleFilter(newcomer=False).is_shown(lines[0])


@pytest.mark.parametrize("form", ["iso", "json"])
def test_lines_have_their_time_node_and_worker_where_that_is_asked_for(bench, form):
    script = bench.script("import sys; print('to be read'); print('and this', file=sys.stderr)")
    launch = bench.run("--log-format", form, "--log-dir", "logs", script)
    log = bench.log().splitlines()
    assert len(log) == 2
    (line,) = [line for line in log if "to be read" in line]
    assert line in launch.out
    if form == "iso":
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z \S+-0 worker 0: to be read", line)
        assert all("Z " in said for said in launch.err.splitlines())
        return
    told = json.loads(line)
    assert (told["worker"], told["stream"], told["text"]) == (0, "stdout", "to be read")
    assert told["node"].endswith("-0")
    assert all(json.loads(said)["text"] for said in launch.err.splitlines())


@pytest.mark.parametrize("form", ["iso", "json"])
@pytest.mark.parametrize("script", ["pretrain_gpt_recover.py", "missing.py"])
def test_what_is_said_before_anything_is_started_has_that_form_too(bench, form, script):
    launch = bench.run("--log-format", form, "--nproc-per-node", "0", "--log-dir", "/dev/null/logs", script, ends=2)
    said = launch.err.splitlines()
    if form == "iso":
        assert len(said) > 1, "the reasons are lines of their own"
        for line in said:
            assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z \S+-0 worker -: ", line)
        return
    told = [json.loads(line) for line in said]
    assert "--nproc-per-node" in told[-1]["text"]
    assert len(told) == (2 if script == "pretrain_gpt_recover.py" else 1), "the installed script is told of"
    assert all(line["node"].endswith("-0") and line["worker"] == "-" for line in told)
