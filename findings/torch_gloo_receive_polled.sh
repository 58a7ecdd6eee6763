#!/usr/bin/env bash
# torch 2.15.0: torch.distributed over gloo, two processes without a GPU: a message has arrived, and its receiver asks
#   the work of its irecv whether it is completed.
#
# Guess: is_completed() turns True when the message has arrived, as it does for an all_reduce that is asked the same.
# Seen: the tensor has the message, and is_completed() stays False until wait() is called; the same for the isend of
#   the sender.  A loop that polls for a message over gloo never ends, though the message is there.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
index=()
if curl -fsI -m 10 https://download.pytorch.org/whl/cpu/torch/ >/dev/null 2>&1; then
    index=(--extra-index-url https://download.pytorch.org/whl/cpu)
fi
"${PYTHON:-python3.12}" -m venv "$folder/venv" &&
    "$folder/venv/bin/pip" install -q --disable-pip-version-check "${index[@]}" torch==2.15.0 || exit 2

cd "$folder"
"$folder/venv/bin/python" -W ignore - >out 2>errors <<'PYTHON'
import os
import time

import torch
import torch.distributed as dist

child = os.fork()
rank = int(child == 0)
dist.init_process_group("gloo", store=dist.FileStore("store", 2), rank=rank, world_size=2)


def polled(work, until=lambda: True):
    """Whether the work is completed, asked for two seconds at most and after ``until`` holds."""
    end = time.monotonic() + 2
    while time.monotonic() < end and not (until() and work.is_completed()):
        time.sleep(0.01)
    assert until()
    return work.is_completed()


summed = dist.all_reduce(torch.ones(4), async_op=True)
told = [f"all_reduce, polled: {polled(summed)}"]
summed.wait()
tensor = torch.zeros(4) if rank == 0 else torch.ones(4)
work = dist.irecv(tensor, 1) if rank == 0 else dist.isend(tensor, 0)
name = "irecv" if rank == 0 else "isend"
told.append(f"{name}, polled: {polled(work, lambda: bool(tensor.all()))}")
work.wait()
told.append(f"{name}, after wait(): {work.is_completed()}")
dist.barrier()
for at in range(2):
    if rank == at:
        with open("told", "a") as file:
            print(*told, sep="\n", file=file)
    dist.barrier()
dist.destroy_process_group()
if child:
    assert os.waitpid(child, 0)[1] == 0
    print(open("told").read(), end="")
PYTHON
cat out
test "$(grep -cx 'all_reduce, polled: True' out)" = 2
grep -qx 'irecv, polled: False' out
grep -qx 'isend, polled: False' out
