#!/usr/bin/env bash
# megatron-core 0.19.2: --rampup-batch-size START INCREMENT SAMPLES, on one process without a GPU.
#
# Guess: it is deprecated for --step-batch-size-schedule; while Megatron's parser takes it, the batch grows (4 at the
#   start, 8 after half of 100 samples, 12 at their end, then 16), or a warning says that it does not.
# Seen (torch 2.15.0, numpy 2.5.5): the batch is 16 from the first iteration on.  The only word about the flag is its line
#   in the list of arguments, with the value that was given: the calculator of microbatches has a warning about it, but
#   Megatron's training does not hand the flag to it.
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
"$folder/venv/bin/python" -W ignore - >out <<'PYTHON'
import sys

from megatron.core.num_microbatches_calculator import get_current_global_batch_size, update_num_microbatches
from megatron.training.arguments import parse_args, validate_args
from megatron.training.global_vars import set_global_variables

flags = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16
    --micro-batch-size 2 --lr 1e-3 --min-lr 1e-5 --mock-data --tokenizer-type NullTokenizer --vocab-size 100
    --eval-interval 10 --eval-iters 0 --train-iters 20 --global-batch-size 16 --rampup-batch-size 4 4 100"""
sys.argv[1:] = flags.split()
args = parse_args()
validate_args(args)
set_global_variables(args, build_tokenizer=False)
sizes, consumed = [], 0
for _ in range(8):
    update_num_microbatches(consumed)
    sizes.append(get_current_global_batch_size())
    consumed += sizes[-1]
print("batches:", *sizes)
PYTHON
grep -i -e rampup -e '^batches' out
[[ $(grep -ic rampup out) == 1 && $(grep '^batches' out) == 'batches: 16 16 16 16 16 16 16 16' ]]
