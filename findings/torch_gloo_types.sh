#!/usr/bin/env bash
# torch 2.15.0: torch.distributed over gloo, two processes without a GPU: tensors of several types are added,
#   broadcast, gathered, scattered and sent.
#
# Guess: what only moves bytes takes a tensor of any type; what adds may refuse some.
# Seen: RuntimeError "Invalid scalar type" for int16, uint16, uint32, uint64 and float8, where nothing is added, too;
#   send and recv take them, and so does a view of other bytes (.view(torch.uint8)). All of these operations take
#   int8, uint8, int32, int64, bool, bfloat16; complex64 is added, but not gathered to one rank.
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

import torch
import torch.distributed as dist

child = os.fork()
rank = int(child == 0)
dist.init_process_group("gloo", store=dist.FileStore("store", 2), rank=rank, world_size=2)


def both(one):
    return [torch.zeros_like(one) for _ in range(2)]


operations = {
    "all_reduce": lambda one: dist.all_reduce(one),
    "broadcast": lambda one: dist.broadcast(one, 0),
    "all_gather": lambda one: dist.all_gather(both(one), one),
    "all_to_all_single": lambda one: dist.all_to_all_single(torch.zeros_like(one), one),
    "gather": lambda one: dist.gather(one, None if rank else both(one)),
    "scatter": lambda one: dist.scatter(one, None if rank else both(one)),
    "send and recv": lambda one: dist.recv(one, 0) if rank else dist.send(one, 1),
    "broadcast of bytes": lambda one: dist.broadcast(one.view(torch.uint8), 0),
}
names = "int8 uint8 int32 int64 bool bfloat16 complex64 int16 uint16 uint32 uint64 float8_e4m3fn float8_e5m2"
for name in names.split():
    refused = []
    for operation, run in operations.items():
        try:
            run(torch.zeros(4, dtype=getattr(torch, name)))
        except RuntimeError as error:
            refused.append(operation)
            assert str(error).startswith("Invalid scalar type"), error
    if rank == 0:
        print(f"{name} is refused by: {', '.join(refused) or 'none'}", flush=True)
dist.destroy_process_group()
if child:
    assert os.waitpid(child, 0)[1] == 0
PYTHON
cat out
for name in int8 uint8 int32 int64 bool bfloat16; do
    grep -qx "$name is refused by: none" out
done
grep -qx 'complex64 is refused by: gather' out
for name in int16 uint16 uint32 uint64 float8_e4m3fn float8_e5m2; do
    grep -qx "$name is refused by: all_reduce, broadcast, all_gather, all_to_all_single, gather, scatter" out
done
