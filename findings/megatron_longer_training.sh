#!/usr/bin/env bash
# megatron-core 0.19.2: the order of samples when a training is made longer (--train-iters raised at a resume).
#
# A corpus of 106 samples an epoch; first 100 samples are asked for, which is one epoch, then 110, which is two.
# Guess: the last epoch is shuffled apart when it is short (the code has a threshold of 0.8 for it), so that the first
#   epoch keeps its order, and a resume goes on where it was.
# Seen (torch 2.15.0, numpy 2.5.5): of the first 100 samples one is in its old place.  A resume after 60 samples reads 21 of
#   its next 40 a second time.  The documents are in the same order, but the samples are shuffled after the documents of
#   all epochs, with the same generator, and the number of epochs is in no checkpoint.
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
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import sys

import numpy
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder


class Tokenizer:
    vocab_size, eod, pad = 2000, 1999, 1998
    unique_identifiers = {"class": "none"}


builder = IndexedDatasetBuilder("corpus.bin", dtype=numpy.int32)
for first in range(0, 850, 17):
    builder.add_document(numpy.arange(first, first + 17), [17])
builder.finalize("corpus.idx")
config = GPTDatasetConfig(
    random_seed=1234, sequence_length=8, blend=(["corpus"], None), split="100,0,0", path_to_cache="cache",
    tokenizer=Tokenizer(), reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
)  # fmt: skip


def samples(number):
    train, _, _ = BlendedMegatronDatasetBuilder(GPTDataset, [number, 0, 0], lambda: True, config).build()
    return [tuple(train[at]["tokens"].tolist()) for at in range(number)]


short, long = samples(100), samples(110)
in_place = sum(old == new for old, new in zip(short, long))
again = sum(sample in short[:60] for sample in long[60:100])
print(f"100 samples, then 110: {in_place} of 100 in their old place; after 60, {again} of the next 40 were read before")
sys.exit((in_place, again) != (1, 21))
PYTHON
