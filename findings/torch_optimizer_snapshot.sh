#!/usr/bin/env bash
# torch 2.15.0: a snapshot of an optimizer (a deep copy of its state_dict) is loaded, training goes on, and the snapshot is
# to be loaded once more, on one process without a GPU.
#
# Guess: the snapshot stays as it was taken, since load_state_dict copies what it is given.
# Seen (numpy 2.5.5): the moments in the snapshot change with every step after it was loaded, so that it can be loaded once
#   only: tensors that have the type and device of the parameter already become the optimizer's own.  A counter of Adam's
#   steps does, too.  Of a model load_state_dict copies.
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
"$folder/venv/bin/python" -W ignore - >out <<'PYTHON'
import copy

import torch

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())


def train():
    optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()


train()
snapshot = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
taken = copy.deepcopy(snapshot)
train()
model.load_state_dict(snapshot[0])
optimizer.load_state_dict(snapshot[1])
train()
print("the model's weights are those that were taken:", snapshot[0]["weight"].equal(taken[0]["weight"]))
for name, value in snapshot[1]["state"][0].items():
    print(f"the optimizer's {name} is what was taken:", value.equal(taken[1]["state"][0][name]))
PYTHON
cat out
grep -qx "the model's weights are those that were taken: True" out
for name in step exp_avg exp_avg_sq; do grep -qx "the optimizer's $name is what was taken: False" out; done
