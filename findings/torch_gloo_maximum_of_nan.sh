#!/usr/bin/env bash
# torch 2.15.0: torch.distributed.all_reduce with ReduceOp.MAX or MIN over gloo, of tensors with a NaN, on two processes
#   without a GPU.
#
# Guess: the result is NaN wherever a rank has a NaN, as torch.maximum, torch.max and numpy's maximum say; or, as C's
#   fmax says, the other rank's number: one of the two, for all ranks and places.
# Seen: it depends on the rank that has the NaN, and on its place in the tensor.  Of one element rank 0's NaN is kept and
#   rank 1's is lost; of 64 elements that are all NaN on one rank, 32 are NaN afterwards, whichever rank it was.  Both
#   ranks have the same, in float32, float64, bfloat16 and float16.
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
"$folder/venv/bin/python" -W ignore - >out <<'PYTHON'
import os

import torch
import torch.distributed as dist

child = os.fork()
rank = int(child == 0)
dist.init_process_group("gloo", store=dist.FileStore("store", 2), rank=rank, world_size=2)
for name in ("MAX", "MIN"):
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for size in (1, 64):
            for bad in (0, 1):
                tensor = torch.full((size,), torch.nan if rank == bad else 1.0, dtype=dtype)
                dist.all_reduce(tensor, op=getattr(dist.ReduceOp, name))
                left = torch.tensor([int(tensor.isnan().sum())])
                told = [torch.empty_like(left) for _ in range(2)]
                dist.all_gather(told, left)
                if rank == 0:
                    counts = " and ".join(str(count.item()) for count in told)
                    print(f"{name} {dtype}: of {size} NaN on rank {bad} are left {counts}", flush=True)
dist.destroy_process_group()
if child:
    assert os.waitpid(child, 0)[1] == 0
    one = torch.tensor([torch.nan, 1.0])
    print("torch.maximum:", torch.maximum(one, one.flip(0)).tolist())
PYTHON
cat out
for kind in float32 float64 bfloat16 float16; do
    for name in MAX MIN; do
        grep -qx "$name torch.$kind: of 1 NaN on rank 0 are left 1 and 1" out
        grep -qx "$name torch.$kind: of 1 NaN on rank 1 are left 0 and 0" out
        grep -qx "$name torch.$kind: of 64 NaN on rank 0 are left 32 and 32" out
        grep -qx "$name torch.$kind: of 64 NaN on rank 1 are left 32 and 32" out
    done
done
grep -qx 'torch.maximum: \[nan, nan\]' out
