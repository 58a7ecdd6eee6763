#!/usr/bin/env bash
# megatron-energon 7.4.1: a loader with several workers is restored, gives a few batches, and is saved again; the second
# state is restored.  A training does so when it is started again and fails once more soon after its next checkpoint.
#
# Guess: the batches go on as if the loader had never ended.
# Seen (torch 2.15.0, numpy 2.5.5): so it is where no batch was read between, or one from each worker at least.  With fewer
#   batches than workers, each worker that has given none since the restore falls back to its last internal snapshot, taken
#   every 60 s and here after its first batch: with four workers 12 of the 24 samples of before the first state are read
#   a second time.  No error, no warning.  A worker's state is a snapshot and a number of batches to skip after it, and the
#   second state has 0 for that number.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
index=()
if curl -fsI -m 10 https://download.pytorch.org/whl/cpu/torch/ >/dev/null 2>&1; then
    index=(--extra-index-url https://download.pytorch.org/whl/cpu)
fi
"${PYTHON:-python3.12}" -m venv "$folder/venv" &&
    "$folder/venv/bin/pip" install -q --disable-pip-version-check "${index[@]}" \
        torch==2.15.0 numpy==2.5.5 megatron-energon==7.4.1 || exit 2

cd "$folder"
cat >restore.py <<'PYTHON'
import io
import multiprocessing
import os
import sys
import tarfile

from megatron.energon import WorkerConfig, get_savable_loader, get_train_dataset


def corpus():
    os.mkdir("corpus")
    for shard in range(8):
        with tarfile.open(f"corpus/shard-{shard}.tar", "w") as tar:
            for sample in range(shard * 20, shard * 20 + 20):
                text = str(sample).encode()
                entry = tarfile.TarInfo(f"{sample:04d}.txt")
                entry.size = len(text)
                tar.addfile(entry, io.BytesIO(text))


def run(state, count, workers, connection):
    config = WorkerConfig(rank=0, world_size=1, num_workers=workers)
    dataset = get_train_dataset(
        "corpus", worker_config=config, batch_size=2, shuffle_buffer_size=None, max_samples_per_sequence=None
    )
    loader = get_savable_loader(dataset)
    loader.restore_state_rank(state)
    batch = iter(loader) if count else None
    connection.send([sample for _ in range(count) for sample in next(batch).text])
    connection.send(loader.save_state_rank())
    connection.recv()
    os._exit(0)


def batches(state, count, workers):
    """The next batches of a new process with this state, and its state after them."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=run, args=(state, count, workers, there))
    process.start()
    read, after = here.recv(), here.recv()
    here.send("end")
    process.join()
    return read, after


if __name__ == "__main__":
    if sys.argv[1:] == ["corpus"]:
        sys.exit(corpus())
    seen = {}
    for workers in (1, 4):
        read, first = batches(None, 12, workers)
        rest, _ = batches(first, 24, workers)
        for between in (0, 1, 3, 4):
            begin, second = batches(first, between, workers)
            resumed = begin + batches(second, 24 - between, workers)[0]
            again = seen[workers, between] = len(set(resumed) & set(read))
            print(
                f"{workers} workers, {between} batches between restore and save: the samples are "
                f"{'the same' if resumed == rest else 'others'}, {again} of the {len(read)} first ones are read again",
                flush=True,
            )
    # Workers that have given no batch since, times two of the three batches that each of them had given before.
    silent = {(4, 1): 3 * 2, (4, 3): 1 * 2}
    sys.exit(seen != {case: 2 * silent.get(case, 0) for case in seen})
PYTHON
"$folder/venv/bin/python" restore.py corpus
"$folder/venv/bin/energon" prepare corpus --non-interactive --split-ratio 1,0,0 --sample-type TextSample \
    --field-map '{"text": "txt"}' --no-progress >prepared 2>&1
timeout 300 "$folder/venv/bin/python" -W ignore restore.py 2>errors
