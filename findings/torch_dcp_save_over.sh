#!/usr/bin/env bash
# torch 2.15.0: torch.distributed.checkpoint saves into the folder of the last save (the same checkpoint_id), two processes
# without a GPU, of which one is killed before it has written its part; then two new processes load the folder.
#
# Guess: the old checkpoint is loaded, which was complete, or loading raises an error.
# Seen (numpy 2.5.5): loading raises nothing, and gives a mixture: the survivor's half is of the second save, the other half
#   and the step number are of the first.  Files have the same names in each save and are written in place, and the
#   metadata of the first save, which comes last, still describes them.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
index=()
if curl -fsI -m 10 https://download.pytorch.org/whl/cpu/torch/ >/dev/null 2>&1; then
    index=(--extra-index-url https://download.pytorch.org/whl/cpu)
fi
"${PYTHON:-python3.12}" -m venv "$folder/venv" &&
    "$folder/venv/bin/pip" install -q --disable-pip-version-check "${index[@]}" torch==2.15.0 numpy==2.5.5 || exit 2

cd "$folder"
cat >save.py <<'PYTHON'
import os
import signal
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.tensor import DTensor, Shard, init_device_mesh


class Dies(dcp.FileSystemWriter):
    def write_data(self, plan, planner):
        os.kill(os.getpid(), signal.SIGKILL)


def state(mesh, step):
    local = torch.full((1024,), float(step))
    return {"weight": DTensor.from_local(local, mesh, [Shard(0)]), "step": torch.tensor(step)}


def run(rank, folder, phase):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{phase}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    if phase == "load":
        loaded = state(mesh, 0)
        dcp.load(loaded, checkpoint_id=f"{folder}/last")
        print(f"process {rank}: step {loaded['step']}, weights {loaded['weight'].to_local().unique().tolist()}", flush=True)
    elif phase == "second" and rank == 1:
        dcp.save(state(mesh, 2), storage_writer=Dies(f"{folder}/last"))
    else:
        dcp.save(state(mesh, 1 if phase == "first" else 2), checkpoint_id=f"{folder}/last")
    dist.destroy_process_group()


if __name__ == "__main__":
    for phase in ("first", "second", "load"):
        both = [mp.get_context("spawn").Process(target=run, args=(rank, sys.argv[1], phase)) for rank in range(2)]
        for process in both:
            process.start()
        for process in both:
            process.join()
        print(f"{phase}: exit codes {[process.exitcode for process in both]}", flush=True)
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore save.py "$folder" >out 2>errors
cat out
grep -qx 'first: exit codes \[0, 0\]' out
grep -qx 'second: exit codes \[1, -9\]' out
grep -qx 'process 0: step 1, weights \[2.0\]' out
grep -qx 'process 1: step 1, weights \[1.0\]' out
grep -qx 'load: exit codes \[0, 0\]' out
