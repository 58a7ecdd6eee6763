#!/usr/bin/env bash
# megatron-core 0.19.2: the learning rate with --step-batch-size-schedule and --train-iters, on one process without a GPU.
#
# Guess: with --train-iters 20 and a linear decay it goes from --lr to --min-lr in 20 iterations.
# Seen (torch 2.15.0, numpy 2.5.5): it is at its minimum from the second iteration on.  It is counted in samples, and the
#   length of the decay is 20 batches of --global-batch-size, which is not given with a schedule (both are refused) and
#   so is one microbatch for each data-parallel rank: 40 samples, which the first batch of 64 exceeds.  Warm-up is cut
#   in the same way.  With --train-samples the decay is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
index=()
if curl -fsI -m 10 https://download.pytorch.org/whl/cpu/torch/ >/dev/null 2>&1; then
    index=(--extra-index-url https://download.pytorch.org/whl/cpu)
fi
"${PYTHON:-python3.12}" -m venv "$folder/venv" &&
    "$folder/venv/bin/pip" install -q --disable-pip-version-check "${index[@]}" \
        torch==2.15.0 numpy==2.5.5 megatron-core==0.19.2 || exit 2

cd "$folder"
cat >rates.py <<'PYTHON'
import sys

import torch
from megatron.core.num_microbatches_calculator import get_current_global_batch_size, update_num_microbatches
from megatron.training.arguments import parse_args, validate_args
from megatron.training.global_vars import set_global_variables
from megatron.training.training import get_optimizer_param_scheduler

flags = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16
    --micro-batch-size 2 --lr 1e-3 --min-lr 1e-5 --mock-data --tokenizer-type NullTokenizer --vocab-size 100
    --eval-interval 10 --eval-iters 0 --lr-decay-style linear"""
sys.argv[1:] = [*flags.split(), "--step-batch-size-schedule", "0:64", *sys.argv[1:]]
args = parse_args()
validate_args(args)
set_global_variables(args, build_tokenizer=False)
optimizer = torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "max_lr": 1e-3, "min_lr": 1e-5}])
scheduler, rates, consumed = get_optimizer_param_scheduler(optimizer), [], 0
for _ in range(20):
    update_num_microbatches(consumed)
    rates.append(optimizer.param_groups[0]["lr"])
    consumed += get_current_global_batch_size()
    scheduler.step(increment=get_current_global_batch_size())
print("rates:", *(f"{rate:.5f}" for rate in rates))
PYTHON
"$folder/venv/bin/python" -W ignore rates.py --train-iters 20 | grep ^rates | tee iterations
"$folder/venv/bin/python" -W ignore rates.py --train-samples 1280 | grep ^rates | tee samples
grep -q '^rates: 0.00100\( 0.00001\)\{19\}$' iterations
grep -q '^rates: 0.00100 0.00095 .* 0.00006$' samples
