#!/usr/bin/env bash
# torch 2.15.0: an optimizer loads its own state_dict, with parameters of bfloat16, on one process without a GPU.
#
# Guess: the optimizers of torch.optim keep what load_state_dict casts in the type of the parameter anyway, so that all go
#   on with the same bits; of an optimizer of one's own it casts tensors of floating-point numbers, and nothing else.
# Seen: NAdam's mu_product and ASGD's eta and mu are float32 while training, and bfloat16 after loading; with NAdam 22 of
#   100,000 parameters are others 37 steps later, without a word.  A counter of int64 becomes one of bfloat16, so that
#   1001 is 1000 then, and a text becomes "<generator object ...>".
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
import copy

import torch


def train(parameter, optimizer, steps):
    for step in steps:
        parameter.grad = torch.randn(100_000, generator=torch.Generator().manual_seed(step)).bfloat16()
        optimizer.step()


def new():
    return torch.nn.Parameter(torch.randn(100_000, generator=torch.Generator().manual_seed(9)).bfloat16())


for cls in (torch.optim.NAdam, torch.optim.ASGD, torch.optim.AdamW):
    one, other = new(), new()
    first, second = cls([one], lr=0.003), cls([other], lr=0.003)
    train(one, first, range(3))
    other.data.copy_(one.data)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    before, after = first.state[one], second.state[other]
    cast = [f"{name} {its.dtype} -> {after[name].dtype}" for name, its in before.items() if its.dtype != after[name].dtype]
    train(one, first, range(3, 40))
    train(other, second, range(3, 40))
    print(f"{cls.__name__}: cast: {', '.join(cast) or 'nothing'}; parameters that differ: {int((one != other).sum())}")

parameter = new()
optimizer = torch.optim.SGD([parameter])
optimizer.state[parameter] = {"seen": torch.tensor(1001), "kind": "wide"}
optimizer.load_state_dict(optimizer.state_dict())
loaded = optimizer.state[parameter]
print("a counter of 1001:", loaded["seen"].item(), loaded["seen"].dtype)
print("a text:", loaded["kind"].split(" at ")[0])
PYTHON
cat out
grep -q '^NAdam: cast: mu_product torch.float32 -> torch.bfloat16; parameters that differ: [1-9]' out
grep -q '^ASGD: cast: eta torch.float32 -> torch.bfloat16, mu torch.float32 -> torch.bfloat16;' out
grep -qx 'AdamW: cast: nothing; parameters that differ: 0' out
grep -qx 'a counter of 1001: 1000.0 torch.bfloat16' out
grep -q '^a text: <generator object ' out
