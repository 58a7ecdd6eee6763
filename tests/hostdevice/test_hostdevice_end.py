"""A script that has ended well ends with 0, whatever gloo's threads still hold."""

import subprocess
import sys

import pytest

from tests.harness.patience import patient
from tests.harness.processes import free_port

pytestmark = pytest.mark.slow

# Rank 0 leaves its tensor to the thread that sums it, which gives it up while the process ends: that takes a second.
# Rank 1 sums with it only after rank 0 has let go of the tensor: else rank 0's main thread could be the one to do so.
SCRIPT = """
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
    (tmp_path / "script.py").write_text(SCRIPT)
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
