#!/usr/bin/env bash
# tensorboard 2.21.0, torch 2.15.0: a training goes back from step 10 to step 5, and writes steps 6 to 8 again: with the
# same SummaryWriter, with a new one in the same folder, and with a new one that was given purge_step=6.
#
# Guess: each reader of these files shows both lines, 13 points, but for the folder with purge_step, where each shows the
#   8 points that count.
# Seen (numpy 2.5.5, tensorboard-data-server 0.7.2): it depends on the reader alone.  The server as it is started by
#   default has 8 points in all three: a step takes back what was read of later ones of its tag.  With --load_fast false
#   it has 13 in all three, also with purge_step, since the first START of a folder is not taken for a second one.
#   EventAccumulator, of scripts, is the only one that does as guessed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
index=()
if curl -fsI -m 10 https://download.pytorch.org/whl/cpu/torch/ >/dev/null 2>&1; then
    index=(--extra-index-url https://download.pytorch.org/whl/cpu)
fi
"${PYTHON:-python3.12}" -m venv "$folder/venv" &&
    "$folder/venv/bin/pip" install -q --disable-pip-version-check "${index[@]}" \
        torch==2.15.0 numpy==2.5.5 tensorboard==2.21.0 tensorboard-data-server==0.7.2 setuptools==84.2.1 || exit 2

cd "$folder"
cat >read.py <<'PYTHON'
import json
import re
import subprocess
import sys
import time
import urllib.request

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

RUNS = ("same-writer", "new-writer", "purge-step")


def write(writer, steps, first):
    for step in steps:
        writer.add_scalar("loss", first + step, step)
    writer.flush()


def served(*flags):
    """Steps that TensorBoard's server shows, as its page asks for them."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", "runs", "--port", "0", *flags]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    address = next(found[0] for line in server.stderr if (found := re.search(r"http://\S+", line)))
    try:
        while len(json.load(urllib.request.urlopen(f"{address}data/plugin/scalars/tags"))) < len(RUNS):
            time.sleep(0.2)
        for run in RUNS:
            asked = f"{address}data/plugin/scalars/scalars?tag=loss&run={run}"
            yield [step for _, step, _ in json.load(urllib.request.urlopen(asked))]
    finally:
        server.terminate()
        server.wait()


writers = [SummaryWriter(f"runs/{run}") for run in RUNS]
for writer in writers:
    write(writer, range(1, 11), 0)
for writer in writers[1:]:
    writer.close()
time.sleep(1.1)  # files have the second in their names
for writer in (writers[0], SummaryWriter("runs/new-writer"), SummaryWriter("runs/purge-step", purge_step=6)):
    write(writer, range(6, 9), 100)
    writer.close()

both = [*range(1, 11), 6, 7, 8]
newest = [*range(1, 9)]
seen = {
    "the server": list(served()),
    "the server, --load_fast false": list(served("--load_fast", "false")),
    "EventAccumulator": [[each.step for each in EventAccumulator(f"runs/{run}").Reload().Scalars("loss")] for run in RUNS],
}
for reader, shown in seen.items():
    for run, steps in zip(RUNS, shown):
        print(f"{run}, {reader}: {steps}")
sys.exit(list(seen.values()) != [[newest] * 3, [both] * 3, [both, both, newest]])
PYTHON
"$folder/venv/bin/python" -W ignore read.py
