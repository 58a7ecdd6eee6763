#!/usr/bin/env bash
# megatron-core 0.19.2: exit codes of processes that Megatron ends because it cannot begin.  The tracker file of --load is
# empty, as a death or a full disk leaves it; there is no checkpoint, with --exit-on-missing-checkpoint; a removed flag.
#
# Guess: a traceback, or a message and an exit code other than 0, by which a scheduler knows that the job has failed.
# Seen (torch 2.15.0, numpy 2.5.5): one line is printed, and the exit code is 0 in all three: sys.exit() and exit() without
#   a number.  torchrun and SLURM take the training for complete.
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
cat >begin.py <<'PYTHON'
import torch
from megatron.training import checkpointing, global_vars
from megatron.training.arguments import parse_args, validate_args

args = parse_args()
if args.checkpoint_activations:
    validate_args(args)
global_vars.set_args(args)
checkpointing.load_checkpoint([torch.nn.Linear(1, 1)], None, None)
print("the training begins")
PYTHON
mkdir cut empty
touch cut/latest_checkpointed_iteration.txt
changed=0
for flags in '--load cut' '--load empty --exit-on-missing-checkpoint' '--checkpoint-activations'; do
    code=0
    # shellcheck disable=SC2086  # several words
    WORLD_SIZE=1 "$folder/venv/bin/python" -W ignore begin.py --num-layers 2 --hidden-size 8 --num-attention-heads 2 \
        --seq-length 8 --max-position-embeddings 8 --micro-batch-size 1 $flags >out 2>errors || code=$?
    said=$(grep -E 'Invalid metadata file|exiting|no longer valid' out || true)
    echo "$flags: exit code $code: $said"
    if [ "$code" != 0 ] || [ -z "$said" ] || grep -q 'the training begins' out; then
        cat errors
        changed=1
    fi
done
exit "$changed"
