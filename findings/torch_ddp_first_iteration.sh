#!/usr/bin/env bash
# torch 2.15.0: DistributedDataParallel over gloo, four iterations with the same parameters and the same data in each, 2, 3
# and 4 processes without a GPU.
#
# Guess: the gradients of all four iterations have the same bits.
# Seen (numpy 2.5.5): with 3 and 4 processes those of the first iteration differ in their last bits from those of the
#   others, which are equal (2 processes: all are equal).  After the first backward pass DDP puts the parameters into other
#   buckets, and the order in which gloo adds up an element depends on its place in a bucket.  So a training that is
#   started again from a checkpoint never has the bits of the one that went on.
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
cat >train.py <<'PYTHON'
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, ranks, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{ranks}", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    data = torch.randn(8, 64, generator=torch.Generator().manual_seed(100 + rank))
    sums = []
    for _ in range(4):
        wrapped.zero_grad()
        wrapped(data).square().mean().backward()
        sums.append(torch.cat([its.grad.flatten() for its in model.parameters()]))
    if rank == 0:
        first, second, *later = sums
        changed = any(not first.equal(its) for its in (second, *later))
        steady = all(second.equal(its) for its in later)
        most = (first - second).abs().max() / first.abs().max()
        print(f"{ranks} processes: first iteration differs: {changed}, the others are equal: {steady} (by {most:.0e})")
    dist.destroy_process_group()


if __name__ == "__main__":
    for ranks in (2, 3, 4):
        mp.spawn(run, (ranks, sys.argv[1]), nprocs=ranks)
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore train.py "$folder" >out
cat out
grep -q '^2 processes: first iteration differs: False, the others are equal: True' out
grep -q '^3 processes: first iteration differs: True, the others are equal: True' out
grep -q '^4 processes: first iteration differs: True, the others are equal: True' out
