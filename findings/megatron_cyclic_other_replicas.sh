#!/usr/bin/env bash
# megatron-core 0.19.2: MegatronPretrainingRandomSampler (--dataloader-type cyclic), 96 samples, microbatches of 2, half of
# the epoch read by 4 data-parallel ranks and the rest by another number, on one process without a GPU.
#
# Guess: consumed_samples says how far the epoch is, so the rest are the samples that were not read yet, as the sampler
#   for data in order (--dataloader-type single) has it.
# Seen (torch 2.15.0, numpy 2.5.5): with data_sharding, which is the default, 19 of the 48 samples that are left are read
#   again on 3 ranks, 16 on 2 and 22 on 6, and as many are never read: each rank shuffles a part of its own.  Without
#   data_sharding none is read twice.  Nothing is said.
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
import itertools

from megatron.training.datasets.data_samplers import MegatronPretrainingRandomSampler

TOTAL, SIZE = 96, 2


def read(ranks, consumed, samples, sharded):
    """The samples that all ranks read from ``consumed`` on, ``samples`` of them."""
    found = []
    for rank in range(ranks):
        sampler = MegatronPretrainingRandomSampler(None, TOTAL, consumed, SIZE, rank, ranks, sharded)
        found += itertools.chain.from_iterable(itertools.islice(sampler, samples // (SIZE * ranks)))
    assert len(found) == samples
    return found


for sharded in (True, False):
    before = read(4, 0, 48, sharded)
    for ranks in (4, 3, 2, 6):
        again = len(set(before) & set(read(ranks, 48, 48, sharded)))
        print(f"data_sharding={sharded}: 4 ranks, then {ranks}: {again} of 48 are read again")
PYTHON
cat out
for line in "4: 0" "3: 19" "2: 16" "6: 22"; do
    grep -q "^data_sharding=True: 4 ranks, then $line of 48" out
    grep -q "^data_sharding=False: 4 ranks, then ${line%:*}: 0 of 48" out
done
