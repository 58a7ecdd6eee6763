#!/usr/bin/env bash
# megatron-energon 7.4.1: the state of a loader with two workers is restored in the middle of an epoch where something is
# another: the number of workers, the size of the shuffle buffer, or the shards (one more, whose name sorts first; the
# corpus is prepared again).
#
# Guess: an error each time; at least no sample of the epoch is read again.
# Seen (torch 2.15.0, numpy 2.5.5): only the number of workers is an error (AssertionError, without a text).  Else there is
#   neither an error nor a warning.  With a buffer of 5 samples instead of 10, 8 of the 16 samples read before are read
#   again: batches are skipped by their number, and are now others.  With the shard 12 of the 16 are read again in the rest
#   of the epoch, and 18 of the old shards are not read in it: shards and places in them are kept as numbers.
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
import subprocess
import sys
import tarfile
from pathlib import Path

from megatron.energon import WorkerConfig, get_savable_loader, get_train_dataset

PREPARE = ["prepare", "--non-interactive", "--split-ratio", "1,0,0", "--sample-type", "TextSample"]
PREPARE += ["--field-map", '{"text": "txt"}', "--no-progress", "--force-overwrite"]


def corpus(name, shards):
    os.mkdir(name)
    for shard in shards:
        with tarfile.open(f"{name}/shard-{shard}.tar", "w") as tar:
            for sample in range(shard * 20, shard * 20 + 20):
                text = str(sample).encode()
                entry = tarfile.TarInfo(f"{sample:04d}.txt")
                entry.size = len(text)
                tar.addfile(entry, io.BytesIO(text))
    subprocess.run([Path(sys.executable).with_name("energon"), *PREPARE, name], check=True, capture_output=True)


def run(connection, state, count, name="corpus", buffer=10, workers=2):
    config = WorkerConfig(rank=0, world_size=1, num_workers=workers)
    dataset = get_train_dataset(
        name, worker_config=config, batch_size=2, shuffle_buffer_size=buffer, max_samples_per_sequence=None
    )
    loader = get_savable_loader(dataset)
    try:
        loader.restore_state_rank(state)
        batch = iter(loader)
        connection.send([int(sample) for _ in range(count) for sample in next(batch).text])
        connection.send(loader.save_state_rank())
    except Exception as error:
        connection.send(type(error).__name__)
        connection.send(None)
    connection.recv()
    os._exit(0)


def batches(state, count, **other):
    """The next samples of a new process with this state, and its state after them."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=run, args=(there, state, count), kwargs=other)
    process.start()
    read, after = here.recv(), here.recv()
    here.send("end")
    process.join()
    return read, after


if __name__ == "__main__":
    corpus("corpus", range(1, 5))
    corpus("larger", range(5))
    seen = []
    for name, count, first, other in (
        ("nothing", 12, {}, {}),
        ("the number of workers", 12, {}, {"workers": 1}),
        ("the size of the buffer", 12, {}, {"buffer": 5}),
        ("nothing, without a buffer, to the end of the epoch", 32, {"buffer": None}, {"buffer": None}),
        ("the shards, likewise", 42, {"buffer": None}, {"buffer": None, "name": "larger"}),
    ):
        read, state = batches(None, 8, **first)
        now, _ = batches(state, count, **other)
        if isinstance(now, str):
            seen.append(now)
            print(f"another is {name}: {now}", flush=True)
            continue
        again, never = len(set(now) & set(read)), len(set(range(20, 100)) - set(now) - set(read))
        seen.append((again, never if count > 12 else None))
        print(
            f"another is {name}: {again} of {len(read)} samples are read again"
            + (f", {never} of the old shards are not read" if count > 12 else ""),
            flush=True,
        )
    sys.exit(seen != [(0, None), "AssertionError", (8, None), (0, 0), (12, 18)])
PYTHON
timeout 300 "$folder/venv/bin/python" -W ignore restore.py 2>errors
