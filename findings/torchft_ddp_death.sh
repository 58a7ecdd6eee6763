#!/usr/bin/env bash
# torchft 0.2.0 with torch 2.15.0: training with torchft.ddp.DistributedDataParallel and torchft.Optimizer on four
#   replicas of one process each, without a GPU, over gloo; one is killed between the forward and the backward pass of
#   a step.
#
# Guess: the step does not commit on the three survivors (should_commit() is false), and they go on without the dead
#   one.
# Seen: backward() raises AssertionError on each survivor: after an error of the all-reduce, DDP's hook takes a result
#   (assert fut._fut) that is not there. A script that does not catch it ends on all replicas. Manager.allreduce
#   without this DDP raises nothing, and torchft-nightly 2026.10.26 does as guessed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
index=()
if curl -fsI -m 10 https://download.pytorch.org/whl/cpu/torch/ >/dev/null 2>&1; then
    index=(--extra-index-url https://download.pytorch.org/whl/cpu)
fi
"${PYTHON:-python3.12}" -m venv "$folder/venv" &&
    "$folder/venv/bin/pip" install -q --disable-pip-version-check "${index[@]}" torchft==0.2.0 torch==2.15.0 &&
    "$folder/venv/bin/pip" install -q --disable-pip-version-check --no-deps --target "$folder/nightly" \
        torchft-nightly==2026.10.26 || exit 2

cd "$folder"
cat >ddp.py <<'PYTHON'
import multiprocessing
import os
import signal
import subprocess
import sys
import traceback
from datetime import timedelta
from importlib.metadata import version
from socket import create_server

import torch
from torch.distributed import TCPStore
from torchft import Manager, Optimizer, ProcessGroupGloo
from torchft.ddp import DistributedDataParallel


def steps(me, port):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)), load_state_dict=model.load_state_dict,
        state_dict=model.state_dict, min_replica_size=1, rank=0, world_size=1, store_addr="127.0.0.1",
        store_port=store.port, lighthouse_addr=f"http://127.0.0.1:{port}", hostname="127.0.0.1",
        replica_id=f"replica{me}",
    )
    parallel = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1))
    steps_of_four = 0
    while steps_of_four < 4:
        before = manager.current_step()
        optimizer.zero_grad()
        loss = parallel(torch.ones(1, 4)).sum()
        manager.wait_quorum()
        if me == 3 and steps_of_four == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
        steps_of_four += manager.num_participants() == 4
    return "committed" if manager.current_step() > before else "not committed"


def replica(me, port, seen):
    try:
        seen.put(steps(me, port))
    except AssertionError as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        seen.put(f"AssertionError out of backward(), from {os.path.basename(last.filename)}: {last.line}")
    signal.pause()


def main():
    with create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.argv[1], "--bind", f"127.0.0.1:{port}", "--min_replicas", "3"]
    lighthouse = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    spawn = multiprocessing.get_context("spawn")
    seen = spawn.Queue()
    replicas = [spawn.Process(target=replica, args=(me, port, seen)) for me in range(4)]
    for process in replicas:
        process.start()
    for result in sorted(seen.get() for _ in range(3)):
        print(f"{sys.argv[2]} {version(sys.argv[2])}: a survivor's step: {result}", flush=True)
    for process in replicas:
        process.kill()
        process.join()
    lighthouse.kill()
    lighthouse.wait()


if __name__ == "__main__":
    main()
PYTHON
export OMP_NUM_THREADS=1
lighthouse=$folder/venv/bin/torchft_lighthouse
"$folder/venv/bin/python" -W ignore ddp.py "$lighthouse" torchft >out 2>errors
PYTHONPATH=$folder/nightly "$folder/venv/bin/python" -W ignore ddp.py "$lighthouse" torchft-nightly >>out 2>>errors
cat out
error='AssertionError out of backward(), from ddp.py: assert fut._fut'
test "$(grep -cx "torchft 0.2.0: a survivor's step: $error" out)" = 3
test "$(grep -cx "torchft-nightly 2026.10.26: a survivor's step: not committed" out)" = 3
