"""``python -m recover_megatron.hostdevice``: a script sees what it would under Python itself, and ends as it would."""

import subprocess
import sys

import pytest

from tests.harness.patience import patient
from tests.harness.processes import free_port

pytestmark = pytest.mark.slow

SCRIPT = """
import multiprocessing, os, sys
from beside import VALUE
from recover_megatron import hostdevice

class Task:
    def __init__(self):
        self.value = VALUE

def work(task, queue):
    import torch
    queue.put((hostdevice.is_active(), torch.zeros(1, device="cuda").device.type, task.value, __name__))

if __name__ == "__main__":
    import __main__
    assert __main__.Task is Task and __file__.endswith("script.py"), __file__
    print("arguments", sys.argv[1:])
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    child = context.Process(target=work, args=(Task(), queue))
    child.start()
    child.join()
    assert child.exitcode == 0, child.exitcode
    print("child", queue.get())
    sys.exit(7)
"""


def write(folder):
    """The script and a module beside it."""
    folder.mkdir()
    (folder / "script.py").write_text(SCRIPT)
    (folder / "beside.py").write_text("VALUE = 5\n")
    (folder / "__init__.py").touch()


def test_a_script_runs_as_main_and_its_spawned_children_have_the_host_device_too(fresh_python, tmp_path):
    write(tmp_path / "scripts")
    done = fresh_python("-m", "recover_megatron.hostdevice", "scripts/script.py", "--flag", "-m")
    assert done.returncode == 7, done.stderr
    assert "arguments ['--flag', '-m']" in done.stdout
    assert "child (True, 'cpu', 5, '__mp_main__')" in done.stdout
    assert done.stderr.count("[hostdevice]") == 1


def test_a_module_runs_as_main_too(fresh_python, tmp_path):
    write(tmp_path / "scripts")
    script = tmp_path / "scripts" / "script.py"
    script.write_text(script.read_text().replace("from beside", "from .beside"))
    done = fresh_python("-W", "error", "-m", "recover_megatron.hostdevice", "-m", "scripts.script", "x")
    assert done.returncode == 7, done.stderr
    assert "arguments ['x']" in done.stdout
    assert "child (True, 'cpu', 5, '__mp_main__')" in done.stdout


def test_a_missing_script_is_one_line_and_status_2(fresh_python):
    for arguments, name in (
        (["no/such.py"], "no/such.py"),
        (["-m", "no.such"], "no.such"),
        (["-m", "json.no"], "json.no"),
    ):
        done = fresh_python("-m", "recover_megatron.hostdevice", *arguments)
        assert done.returncode == 2
        line = done.stderr.splitlines()[-1]
        assert len(done.stderr.splitlines()) == (
            1 if name == "no/such.py" else 2
        )  # a module is sought with torch in place
        assert line.startswith("[hostdevice] ")
        assert name in line
        assert "Traceback" not in done.stderr


def test_no_script_is_the_usage_and_status_2(fresh_python):
    done = fresh_python("-m", "recover_megatron.hostdevice")
    assert done.returncode == 2
    assert done.stderr.startswith("usage: ")
    assert fresh_python("-m", "recover_megatron.hostdevice", "--help").returncode == 0


def test_the_scripts_own_errors_are_the_scripts(fresh_python, tmp_path):
    (tmp_path / "broken.py").write_text("open('absent')\n")
    done = fresh_python("-m", "recover_megatron.hostdevice", "broken.py")
    assert done.returncode == 1
    assert "FileNotFoundError" in done.stderr
    assert "broken.py" in done.stderr


# Rank 0 leaves its tensor to the thread that sums it, which gives it up while the process ends: that takes a second.
# Rank 1 sums with it only after rank 0 has let go of the tensor: else rank 0's main thread could be the one to do so.
GIVES_UP = """
import atexit, sys, threading, time
import torch
import torch.distributed as dist

class Kept(torch.Tensor):
    def __del__(self):
        if threading.current_thread() is not threading.main_thread():
            given_up.set()
            time.sleep(1)

given_up = threading.Event()
atexit.register(print, "what is registered is called", flush=True)
dist.init_process_group("gloo")
store = dist.distributed_c10d._get_default_store()
tensor = torch.ones(1).as_subclass(Kept)
if dist.get_rank() == 1:
    store.wait(["rank 0 has let go"])
    dist.all_reduce(tensor)
else:
    work = dist.all_reduce(tensor, async_op=True)
    del tensor, work
    store.set("rank 0 has let go", "")
    assert given_up.wait(float(sys.argv[1]))
"""


def test_a_thread_of_gloos_that_gives_up_a_tensor_at_the_end_does_not_end_the_process_by_a_signal(tmp_path):
    (tmp_path / "script.py").write_text(GIVES_UP)
    port = free_port()
    command = [sys.executable, "-m", "recover_megatron.hostdevice", str(tmp_path / "script.py"), f"{patient(60):g}"]
    ranks = [
        subprocess.Popen(
            command,
            env={"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
            | {"PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=patient(120))[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert all("what is registered is called" in each for each in said), said
