"""A worker is what ``python SCRIPT`` would be: its exit code, output and traceback are the interpreter's own."""

import signal

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("body", "code", "shown"),
    [
        ("sys.exit(5)", 5, ""),
        ("sys.exit('a message')", 1, "a message"),
        ("sys.exit()", 0, ""),
        ("raise ValueError('uncaught')", 1, "ValueError: uncaught"),
        ("os._exit(9)", 9, ""),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt"),
        ("atexit.register(print, 'AT EXIT')", 0, "AT EXIT"),
        ("print('unflushed', end='')", 0, "unflushed"),
        ("threading.Thread(target=lambda: (time.sleep(0.2), print('THREAD DONE'))).start()", 0, "THREAD DONE"),
        ("def f(): assert False, 'deep'\n    f()", 1, "AssertionError: deep"),
    ],
)
def test_a_worker_ends_as_the_script_does_under_python(bench, body, code, shown):
    script = bench.script(
        f"import atexit, os, signal, sys, threading, time\nif __name__ == '__main__':\n    print('RUNS')\n    {body}\n"
    )
    bench.run("--log-dir", "logs", script, ends=code if code >= 0 else 128 - code)
    (worker,) = bench.workers()
    assert (worker["exit_code"] if worker["signal"] is None else -worker["signal"]) == code
    log = bench.log()
    assert shown in log
    assert "RUNS" in log
    assert "recover_megatron" not in log


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_multiprocessing_works_in_a_worker(bench, method):
    script = bench.script(
        """
        import multiprocessing, os, sys
        def square(number):
            return number * number
        if __name__ == "__main__":
            with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:
                print("SQUARES", pool.map(square, [2, 3]), os.path.basename(sys.modules["__main__"].__file__))
        """
    )
    launch = bench.run(script, method)
    assert "SQUARES [4, 9] script.py" in launch.out


def test_a_folder_as_script_runs_its_main(bench):
    (bench.folder / "folder").mkdir()
    (bench.folder / "folder/__main__.py").write_text("print('RAN')")
    launch = bench.run("folder")
    assert "RAN" in launch.out
