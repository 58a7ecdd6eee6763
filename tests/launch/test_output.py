"""What workers write: shown with a prefix, line by line; kept as it came."""

import os
import re
import signal
import subprocess
import sys

import pytest

from .conftest import DEADLINE, REPOSITORY, eventually


def test_lines_are_prefixed_on_the_stream_they_came_from_and_kept_unprefixed(bench):
    script = bench.script(
        """
        import os, sys
        print("to stdout", os.environ["RANK"])
        print("to stderr", os.environ["RANK"], file=sys.stderr)
        """
    )
    code, launch = bench.run("--nproc-per-node", 2, "--log-dir", "logs", script)
    assert code == 0
    for rank in "01":
        assert f"[{rank}] to stdout {rank}\n" in launch.out
        assert f"[{rank}] to stderr {rank}\n" in launch.err
        log = (bench.folder / "logs" / f"worker-{rank}.log").read_text()
        assert sorted(log.splitlines()) == [f"to stderr {rank}", f"to stdout {rank}"]


def test_prefixes_are_aligned(bench):
    code, launch = bench.run("--nproc-per-node", 11, bench.script("import os; print('x' + os.environ['RANK'])"))
    assert code == 0
    assert "[3]  x3\n" in launch.out
    assert "[10] x10\n" in launch.out


def test_both_streams_are_logged_in_order_of_arrival(bench):
    script = bench.script(
        """
        import sys, time
        for number in range(4):
            print("line", number, file=sys.stderr if number % 2 else sys.stdout)
            time.sleep(0.3)  # the order between two pipes is that of arrival only if they are apart in time
        """
    )
    bench.run("--log-dir", "logs", script)
    assert (bench.folder / "logs/worker-0.log").read_text() == "".join(f"line {number}\n" for number in range(4))


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
    code, launch = bench.run("--nproc-per-node", 3, script)
    assert code == 0
    lines = launch.out.splitlines()
    assert len(lines) == 150
    for line in lines:
        assert re.fullmatch(r"\[(\d)\] \1{997}", line)


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
    (bench.folder / "go").touch()
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

    launch = bench.start("--log-dir", "logs", script)
    assert launch.wait() == 0
    assert launch.out.count("x") == 8 * 2**20
    assert "[0] end\n" in launch.out
    assert max(map(len, launch.out.splitlines())) < 100_000
    assert (bench.folder / "logs/worker-0.log").stat().st_size == 8 * 2**20 + 5


def test_undecodable_bytes_pass(bench):
    script = bench.script(r"import os; os.write(1, b'\xff\xfe\x00 \xc3\n'); os.write(1, b'no newline \xe9')")
    launch = bench.start("--log-dir", "logs", script)
    assert launch.wait() == 0
    assert launch.bytes_out == b"[0] \xff\xfe\x00 \xc3\n[0] no newline \xe9\n"
    assert (bench.folder / "logs/worker-0.log").read_bytes() == b"\xff\xfe\x00 \xc3\nno newline \xe9"


def test_the_last_words_of_a_killed_worker_are_shown(bench):
    script = bench.script("import os, signal; os.write(1, b'last words'); os.kill(os.getpid(), signal.SIGKILL)")
    code, launch = bench.run(script)
    assert code == 137
    assert "[0] last words\n" in launch.out


def test_the_log_of_an_earlier_run_is_kept(bench):
    script = bench.script("import sys; print(sys.argv[1])")
    bench.run("--log-dir", "logs", script, "first")
    bench.run("--log-dir", "logs", script, "second")
    assert (bench.folder / "logs/worker-0.log").read_text() == "second\n"
    assert (bench.folder / "logs/worker-0.log.old").read_text() == "first\n"


def test_no_colour_when_the_output_is_no_terminal(bench):
    assert "\x1b" not in bench.run(bench.script("print('plain')"))[1].out


def test_colour_on_a_terminal(bench):
    script = bench.script("print('colourful')")
    controller, terminal = os.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    process = subprocess.Popen(
        [sys.executable, "-m", "recover_megatron.launch", script],
        cwd=bench.folder,
        env={**environment, "PYTHONPATH": str(REPOSITORY)},
        stdout=terminal,
        stderr=terminal,
    )
    os.close(terminal)
    shown = b""
    while b"exit code 0" not in shown:
        shown += os.read(controller, 65536)
    assert process.wait(DEADLINE) == 0
    os.close(controller)
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
    (bench.folder / "go").touch()
    assert launch.wait() == 0
    assert (bench.folder / "logs/worker-0.log").read_text().count("\n") == 1001


@pytest.fixture
def stalled(bench):
    """A launch whose output nobody reads: a full pipe."""
    read, write = os.pipe()
    script = bench.script(
        """
        import os, time
        open("up", "w").write(str(os.getpid()))
        while True:
            os.write(1, b"x" * 1000 + b"\\n")
        """
    )

    launch = subprocess.Popen(
        [sys.executable, "-m", "recover_megatron.launch", "--grace-seconds", "0.2", "--log-dir", "logs", script],
        cwd=bench.folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=write,
        stderr=subprocess.PIPE,
    )
    os.close(write)
    yield bench, launch
    launch.kill()
    launch.wait()
    launch.stderr.close()
    os.close(read)


def test_a_reader_that_does_not_read_blocks_the_worker_but_not_the_launcher(stalled):
    bench, launch = stalled
    eventually(lambda: (bench.folder / "up").exists(), "the worker runs")
    log = bench.folder / "logs/worker-0.log"
    sizes = []

    def stopped_growing():
        sizes.append(log.stat().st_size)
        return len(sizes) > 50 and len(set(sizes[-50:])) == 1

    eventually(stopped_growing, "the launcher stopped reading")
    assert sizes[-1] < 4 * 2**20
    launch.send_signal(signal.SIGTERM)
    assert launch.wait(DEADLINE) == 128 + signal.SIGTERM
