#!/usr/bin/env bash
# megatron-core 0.19.2: the cache of indices (--data-cache-path, or beside the corpus) when the corpus is replaced.
#
# 50 documents; 100 samples are read.  Then a corpus of 100 documents is written to the same path, and read by another
# process with the same flags and the same cache.
# Guess: the sizes of the files, or their times, are a part of what an index is known by: another one is built.
# Seen (torch 2.15.0, numpy 2.5.5): the old index is used, silently.  It is known by the path, not by what is there.
#   Of the new corpus's 100 documents only the first 50 are ever read.
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
cat >read.py <<'PYTHON'
import sys

import numpy
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

documents, expected = map(int, sys.argv[1:])


class Tokenizer:
    vocab_size, eod, pad = 2000, 1999, 1998
    unique_identifiers = {"class": "none"}


builder = IndexedDatasetBuilder("corpus.bin", dtype=numpy.int32)
for number in range(documents):
    builder.add_document(numpy.full(17, number), [17])
builder.finalize("corpus.idx")
config = GPTDatasetConfig(
    random_seed=1234, sequence_length=8, blend=(["corpus"], None), split="100,0,0", path_to_cache="cache",
    tokenizer=Tokenizer(), reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
)  # fmt: skip
train, _, _ = BlendedMegatronDatasetBuilder(GPTDataset, [200, 0, 0], lambda: True, config).build()
read = {token for at in range(200) for token in train[at]["tokens"].tolist()}
print(f"{documents} documents: {len(read)} of them are read, up to number {max(read)}")
sys.exit(len(read) != expected or max(read) != expected - 1)
PYTHON
"$folder/venv/bin/python" -W ignore read.py 50 50
"$folder/venv/bin/python" -W ignore read.py 100 50
rm -r cache
"$folder/venv/bin/python" -W ignore read.py 100 100 # as it is read without the old index
