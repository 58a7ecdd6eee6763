"""--warm: one import for all workers, and workers that are no different from cold ones."""

import os
import signal
from pathlib import Path

import pytest

from recover_megatron.launch.warm_client import why_cold

from .conftest import alive, children, eventually

pytestmark = pytest.mark.slow


def test_what_the_script_imports_is_imported_once_for_all_workers(bench):
    bench.script("open('imports', 'a').write('once ')", "heavy.py")
    script = bench.script(
        """
        import os
        import heavy
        if __name__ == "__main__":
            print("RAN", os.environ["RANK"])
        """
    )
    code, launch = bench.run("--nproc-per-node", 3, "--warm", script)
    assert code == 0
    assert launch.err.splitlines()[0].endswith("start warm")
    assert launch.out.count("RAN") == 3
    assert (bench.folder / "imports").read_text() == "once "


def test_preload_is_called_once_with_the_scripts_arguments(bench):
    script = bench.script(
        """
        import sys
        LOADED_AS = __name__
        def preload(argv):
            print("PRELOAD", LOADED_AS, argv, sys.argv)
        if __name__ == "__main__":
            print("MAIN", sys.argv)
        """
    )
    code, launch = bench.run("--nproc-per-node", 2, "--warm", script, "--lr", "1")
    assert code == 0
    argv = ["script.py", "--lr", "1"]
    assert launch.out.count("PRELOAD") == 1
    assert f"PRELOAD __recover_preload__ {argv[1:]} {argv}" in launch.out
    assert launch.out.count(f"MAIN {argv}") == 2


def test_preload_that_exits_with_a_message_starts_nothing(bench):
    script = bench.script(
        """
        import sys
        def preload(argv):
            sys.exit("the flag --lr is missing: add it")
        if __name__ == "__main__":
            print("RAN")
        """
    )
    code, launch = bench.run("--nproc-per-node", 4, "--warm", "--log-dir", "logs", script)
    assert code == 1
    assert (launch.out + launch.err).count("the flag --lr is missing: add it") == 1
    assert "Traceback" not in launch.err
    assert "RAN" not in launch.out
    assert launch.left() == []


def test_preload_whose_argparse_refuses_a_flag_gives_its_code(bench):
    script = bench.script(
        """
        import argparse
        def preload(argv):
            argparse.ArgumentParser().parse_args(argv)
        if __name__ == "__main__":
            print("RAN")
        """
    )
    code, launch = bench.run("--nproc-per-node", 4, "--warm", script, "--wrong")
    assert code == 2
    assert launch.err.count("unrecognized arguments: --wrong") == 1
    assert "Traceback" not in launch.err
    assert "RAN" not in launch.out


def test_an_exception_while_loading_is_shown_once_without_our_frames(bench):
    script = bench.script("raise ValueError('broken script')")
    code, launch = bench.run("--nproc-per-node", 4, "--warm", script)
    assert code == 1
    assert launch.err.count("ValueError: broken script") == 1
    assert "recover_megatron" not in launch.err


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
def test_a_warm_worker_ends_as_a_cold_one(bench, body, code, shown):
    script = bench.script(
        f"import atexit, os, signal, sys, threading, time\nif __name__ == '__main__':\n    print('RUNS')\n    {body}\n"
    )
    ends = []
    for warm in ([], ["--warm"]):
        _, launch = bench.run("--log-dir", "logs", *warm, script)
        (worker,) = bench.workers()
        ends.append(worker["exit_code"] if worker["signal"] is None else -worker["signal"])
        log = (bench.folder / "logs/worker-0.log").read_text()
        assert shown in log
        assert "RUNS" in log
        assert "recover_megatron" not in log or body == "raise KeyboardInterrupt"
        assert launch.left() == []
    assert ends == [code, code]


def test_the_traceback_of_a_warm_worker_is_that_of_a_cold_one(bench):
    script = bench.script("def f():\n    raise ValueError('x')\nif __name__ == '__main__':\n    f()\n")
    logs = []
    for warm in ([], ["--warm"]):
        bench.run("--log-dir", "logs", *warm, script)
        logs.append((bench.folder / "logs/worker-0.log").read_text())
    assert logs[0] == logs[1]


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_multiprocessing_works_in_a_warm_worker(bench, method):
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
    code, launch = bench.run("--warm", script, method)
    assert code == 0, launch.err
    assert "SQUARES [4, 9] script.py" in launch.out


def test_a_module_starts_warm(bench):
    package = bench.folder / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text(
        "import multiprocessing, sys\n"
        "def preload(argv): print('PRELOAD', argv)\n"
        "def square(number): return number * number\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print('MODULE', __spec__.name, pool.map(square, [3]), sys.argv[1:])\n"
    )
    code, launch = bench.run("--warm", "-m", "package.train", "--flag")
    assert code == 0, launch.err
    assert "PRELOAD ['--flag']" in launch.out
    assert "MODULE package.train [9] ['--flag']" in launch.out


def test_environment_and_session_of_a_warm_worker_are_those_of_a_cold_one(bench):
    script = bench.script(
        """
        import json, os, random, sys
        if __name__ == "__main__":
            ignored = ("MASTER_PORT", "RECOVER_LAUNCH_ID", "TORCHELASTIC_RUN_ID", "LAUNCH_TEST_TOKEN")
            ignored += ("RECOVER_COORDINATOR", "RECOVER_SECRET")
            variables = {name: value for name, value in os.environ.items() if name not in ignored}
            print("ENV", json.dumps(variables, sort_keys=True))
            print("SELF", os.getsid(0) == os.getpid(), sys.stdin.read() == "", sys.path[0], sys.argv, __name__)
            initial = open("/proc/self/environ").read().split(chr(0))
            print("INITIAL", f"RECOVER_WORKER_ID={os.environ['RANK']}" in initial)
            print("FILES", sorted(os.listdir("/proc/self/fd"))[:3], len(os.listdir("/proc/self/fd")))
        """
    )
    outputs = []
    for warm in ([], ["--warm"]):
        code, launch = bench.run("--nproc-per-node", 2, *warm, script)
        assert code == 0
        outputs.append(sorted(launch.out.splitlines()))
    assert outputs[0] == outputs[1]
    assert "[1] INITIAL True" in outputs[1]


def test_a_thread_started_by_the_script_means_a_cold_start_that_says_why(bench):
    script = bench.script(
        """
        import os, threading, time
        threading.Thread(target=time.sleep, args=(1000,), daemon=True, name="the-culprit").start()
        if __name__ == "__main__":
            print("RAN", os.environ["RANK"])
        """
    )
    code, launch = bench.run("--nproc-per-node", 2, "--warm", script)
    assert code == 0
    assert "no warm start" in launch.err
    assert "the-culprit" in launch.err
    assert "starting cold" in launch.err
    assert launch.out.count("RAN") == 2


def test_a_native_thread_means_a_cold_start_that_says_why(bench):
    script = bench.script(
        """
        import ctypes, os
        libc = ctypes.CDLL(None)
        thread = ctypes.c_ulong()
        assert libc.pthread_create(ctypes.byref(thread), None, ctypes.cast(libc.sleep, ctypes.c_void_p), 1000) == 0
        if __name__ == "__main__":
            print("RAN")
        """
    )
    code, launch = bench.run("--warm", script)
    assert code == 0
    assert "1 native thread(s)" in launch.err
    assert "RAN" in launch.out


@pytest.mark.slow
def test_importing_numpy_and_torch_starts_no_thread(bench):
    script = bench.script(
        """
        import numpy, torch, torch.distributed, os
        if __name__ == "__main__":
            print("RAN", "OPENBLAS_NUM_THREADS" in os.environ, torch.ones(300, 300).matmul(torch.ones(300, 300)).sum())
        """
    )
    code, launch = bench.run("--nproc-per-node", 2, "--warm", script)
    assert code == 0, launch.err
    assert "no warm start" not in launch.err
    assert launch.out.count("RAN False tensor(27000000.)") == 2


def test_the_death_of_the_parent_process_is_the_death_of_its_workers(bench):
    script = bench.script("import os, time\nif __name__ == '__main__':\n    print('UP')\n    time.sleep(1000)\n")
    launch = bench.start("--nproc-per-node", 2, "--warm", "--log-dir", "logs", script)
    launch.wait_for("UP", times=2)
    pids = {worker["pid"] for worker in bench.workers()}
    (parent,) = [pid for pid in children(launch.pid) if set(children(pid)) == pids]
    os.kill(parent, signal.SIGKILL)
    assert launch.wait() == 137
    assert "the parent process of the warm start was killed by SIGKILL" in launch.err
    assert [worker["signal"] for worker in bench.workers()] == [signal.SIGKILL, signal.SIGKILL]
    assert launch.left() == []


def test_a_signal_while_the_script_is_loaded_ends_the_launch(bench):
    script = bench.script("import time\nprint('LOADING', flush=True)\ntime.sleep(1000)\n")
    launch = bench.start("--nproc-per-node", 2, "--warm", script)
    launch.wait_for("LOADING")
    launch.send(signal.SIGTERM)
    assert launch.wait() == 128 + signal.SIGTERM
    assert launch.left() == []


def test_sigkill_of_the_launcher_while_the_script_is_loaded_leaves_nothing(bench):
    script = bench.script(
        """
        import subprocess, time
        subprocess.Popen(["setsid", "sleep", "1000"])
        print("LOADING")
        time.sleep(1000)
        """
    )
    launch = bench.start("--nproc-per-node", 2, "--warm", script)
    launch.wait_for("LOADING")
    launch.send(signal.SIGKILL)
    launch.wait()
    eventually(lambda: launch.left() == [], "nothing is left")


def test_one_warm_workers_death_does_not_end_the_others(bench):
    script = bench.script(
        "import os, time\n"
        "if __name__ == '__main__':\n"
        "    print('UP')\n"
        "    while not os.path.exists('go'): time.sleep(0.05)\n"
    )
    launch = bench.start("--nproc-per-node", 3, "--warm", "--log-dir", "logs", script)
    launch.wait_for("UP", times=3)
    victim = bench.workers()[2]["pid"]
    os.kill(victim, signal.SIGKILL)
    launch.wait_for("was killed by SIGKILL")
    assert not alive(victim)
    (bench.folder / "go").touch()
    assert launch.wait() == 137
    assert [worker["state"] for worker in bench.workers()] == ["finished", "finished", "killed"]


@pytest.mark.parametrize(
    ("script_args", "environ", "gpu", "cold"),
    [
        ([], {}, False, False),
        ([], {}, True, True),
        ([], {"CUDA_VISIBLE_DEVICES": ""}, True, False),
        ([], {"CUDA_VISIBLE_DEVICES": "-1"}, True, False),
        ([], {"CUDA_VISIBLE_DEVICES": "0"}, True, True),
        (["--recover-device", "cpu"], {}, True, False),
        (["--recover-device=cuda"], {}, False, True),
    ],
)
def test_a_gpu_means_a_cold_start(script_args, environ, gpu, cold):
    assert bool(why_cold("train.py", script_args, environ, gpu)) is cold


def test_a_cold_start_for_a_gpu_is_said_in_the_first_line(bench):
    script = bench.script("print('RAN')")
    code, launch = bench.run("--warm", script, "--recover-device", "cuda")
    assert code == 0
    assert launch.err.splitlines()[0].endswith("start cold (the script asks for --recover-device cuda)")


def test_a_folder_as_script_starts_cold(bench):
    (bench.folder / "folder").mkdir()
    (bench.folder / "folder/__main__.py").write_text("print('RAN')")
    code, launch = bench.run("--warm", "folder")
    assert code == 0
    assert "SCRIPT is a folder" in launch.err
    assert "RAN" in launch.out


def test_loading_output_is_kept_in_a_log_of_its_own(bench):
    script = bench.script("print('loaded as', __name__)")
    bench.run("--warm", "--log-dir", "logs", script)
    assert Path(bench.folder / "logs/warm.log").read_text() == "loaded as __recover_preload__\n"
    assert (bench.folder / "logs/worker-0.log").read_text() == "loaded as __main__\n"
