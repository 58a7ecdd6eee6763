#!/usr/bin/env bash
# tensorboard 2.21.0, torch 2.15.0: two SummaryWriters of one folder write in turns, as when the rank that logs is replaced
# for a time: the first steps 1 to 10, the second 11 to 20, the first 21 to 30.  No step is written twice.
#
# Guess: TensorBoard shows all 30 steps.
# Seen (numpy 2.5.5, tensorboard-data-server 0.7.2): a server that ran all the time shows all 30; one that is started
#   afterwards shows 1 to 20: it reads one file after the other, by name, and step 11 takes back 21 to 30.  An
#   EventAccumulator that was used all the time never reads the first file again, and has 1 to 20; a new one has all 30,
#   with 21 to 30 before 11.
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
cat >turns.py <<'PYTHON'
import json
import re
import subprocess
import sys
import time
import urllib.request

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter


class Server:
    """TensorBoard's server, which reads the files every second."""

    def __init__(self):
        command = [sys.executable, "-m", "tensorboard.main", "--logdir", "runs", "--port", "0", "--reload_interval", "1"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.address = next(found[0] for line in self.process.stderr if (found := re.search(r"http://\S+", line)))

    def ask(self, what):
        return json.load(urllib.request.urlopen(f"{self.address}data/plugin/scalars/{what}"))

    def steps(self, at_least):
        """Steps that it shows, as its page asks for them, when there are so many, or after ten readings."""
        for _ in range(50):
            if self.ask("tags") and len(steps := [step for _, step, _ in self.ask("scalars?tag=loss&run=one")]) >= at_least:
                return steps
            time.sleep(0.2)
        return steps

    def stop(self):
        self.process.terminate()
        self.process.wait()


def write(writer, steps):
    for step in steps:
        writer.add_scalar("loss", step, step)
    writer.flush()


def read(accumulator):
    return [event.step for event in accumulator.Reload().Scalars("loss")]


first = SummaryWriter("runs/one")
write(first, range(1, 11))
old_server, old_accumulator = Server(), EventAccumulator("runs/one")
time.sleep(1.1)  # files have the second in their names
second = SummaryWriter("runs/one")
write(second, range(11, 21))
before = old_server.steps(20), read(old_accumulator)
write(first, range(21, 31))
new_server = Server()
seen = {
    "server before the last turn": before[0],
    "EventAccumulator before the last turn": before[1],
    "server that ran all the time": old_server.steps(30),
    "server that was started afterwards": new_server.steps(30),
    "EventAccumulator that was used all the time": read(old_accumulator),
    "new EventAccumulator": read(EventAccumulator("runs/one")),
}
old_server.stop()
new_server.stop()
for reader, steps in seen.items():
    print(f"{reader}: {steps}")
twenty, thirty = [*range(1, 21)], [*range(1, 31)]
turned = [*range(1, 11), *range(21, 31), *range(11, 21)]
sys.exit(list(seen.values()) != [twenty, twenty, thirty, twenty, twenty, turned])
PYTHON
"$folder/venv/bin/python" -W ignore turns.py
