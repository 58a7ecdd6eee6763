#!/usr/bin/env bash
# torch 2.15.0: the norm of a large float32 tensor on the CPU, on one process and one thread.
#
# Guess: torch.norm adds up as torch.sum does, so that the norm of many millions of elements is right to 1e-6, and
#   clip_grad_norm_ gives a gradient of the norm that it is asked for, to that accuracy.
# Seen: the squares are added one after another in float32, in a few sums side by side.  Of 2^24 random numbers the norm
#   is 0.07 % too small, of 2^26 0.5 %; of the same elements cut in pieces, or by torch.sum, it is right to 1e-6.  So the
#   norm depends on how parameters are cut into tensors, and clip_grad_norm_ to 1.0 leaves a gradient of 1.005.
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
import torch

torch.set_num_threads(1)
for power in (20, 22, 24, 26):
    many = torch.randn(2**power, generator=torch.Generator().manual_seed(1))
    right = many.double().square().sum().sqrt().item()
    whole = torch.norm(many).item() / right - 1
    pieces = torch.stack([torch.norm(piece) for piece in many.split(2**16)]).double().norm().item() / right - 1
    total = many.square().sum().sqrt().item() / right - 1
    print(f"2^{power}: norm {whole:+.1e}, of the norms of pieces {pieces:+.1e}, by torch.sum {total:+.1e}")

parameter = torch.nn.Parameter(torch.zeros(2**26))
parameter.grad = many
torch.nn.utils.clip_grad_norm_([parameter], 1.0)
print(f"norm after clip_grad_norm_ to 1.0: {parameter.grad.double().norm().item():.3f}")
PYTHON
cat out
small='[+-][0-9]\.[0-9]e[+-](00|0[6-9]|1[0-9])'
grep -Eq "^2\^24: norm -[0-9.]+e-0[2-5], of the norms of pieces $small, by torch.sum $small\$" out
grep -Eq "^2\^26: norm -[0-9.]+e-0[1-4], of the norms of pieces $small, by torch.sum $small\$" out
grep -Eq '^norm after clip_grad_norm_ to 1\.0: 1\.(00[1-9]|0[1-9])' out
