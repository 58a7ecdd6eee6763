#!/usr/bin/env bash
# torchdata 0.11.0, torch 2.15.0: StatefulDataLoader with shuffled samples in three forms, in the middle of an epoch: its
# state and torch's random state are kept, and given to a new loader.
#
# torch's DataLoader makes a RandomSampler for shuffle=True, and gives it the generator.
# Guess: the three forms are the same; the rest of the epoch, and the next epoch, are those of the loader that went on.
# Seen (numpy 2.5.5): so it is with shuffle=True.  With sampler=RandomSampler(dataset) the rest of the epoch is cut out of
#   another order: 5 of the 14 samples that are left were read before.  With generator= the rest is right,
#   and all epochs after it are others, but only with num_workers=0.  No error, no warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
index=()
if curl -fsI -m 10 https://download.pytorch.org/whl/cpu/torch/ >/dev/null 2>&1; then
    index=(--extra-index-url https://download.pytorch.org/whl/cpu)
fi
"${PYTHON:-python3.12}" -m venv "$folder/venv" &&
    "$folder/venv/bin/pip" install -q --disable-pip-version-check "${index[@]}" \
        torch==2.15.0 numpy==2.5.5 torchdata==0.11.0 || exit 2

cd "$folder"
cat >resume.py <<'PYTHON'
import copy
import sys

import torch
from torch.utils.data import RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

SAMPLES = list(range(20))
FORMS = {
    "shuffle=True": lambda: {"shuffle": True},
    "generator=": lambda: {"shuffle": True, "generator": torch.Generator().manual_seed(5)},
    "sampler=RandomSampler": lambda: {"sampler": RandomSampler(SAMPLES)},
}


def samples(batches):
    return [sample for batch in batches for sample in batch.tolist()]


def tried(form, workers):
    torch.manual_seed(0)
    loader = StatefulDataLoader(SAMPLES, batch_size=2, num_workers=workers, **form())
    epoch = iter(loader)
    read = samples(next(epoch) for _ in range(3))
    state, generator = copy.deepcopy(loader.state_dict()), torch.get_rng_state()
    rest, following = samples(epoch), samples(loader)

    torch.manual_seed(99)
    loader = StatefulDataLoader(SAMPLES, batch_size=2, num_workers=workers, **form())
    loader.load_state_dict(state)
    torch.set_rng_state(generator)
    resumed = samples(loader)
    return resumed == rest, len(set(resumed) & set(read)), samples(loader) == following


if __name__ == "__main__":
    seen = []
    for workers in (0, 2):
        for name, form in FORMS.items():
            seen.append(tried(form, workers))
            rest, again, following = seen[-1]
            print(
                f"{name}, num_workers={workers}: the rest of the epoch is {'the same' if rest else 'another'}, "
                f"{again} samples were read before; the next epoch is {'the same' if following else 'another'}"
            )
    sys.exit(seen != [(True, 0, True), (True, 0, False), (False, 5, False), (True, 0, True), (True, 0, True), (False, 5, False)])
PYTHON
"$folder/venv/bin/python" -W ignore resume.py
