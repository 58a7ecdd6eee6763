#!/usr/bin/env bash
# Train a small GPT on real text on this machine, with or without a GPU, and kill -9 a worker in the middle of a step:
# set-up, corpus, training, the same training without the death, report.
#
#   scripts/quickstart.sh                      4 data-parallel workers, a few minutes; results in runs/quickstart
#   scripts/quickstart.sh --help               the options
#   scripts/quickstart.sh -- --hidden-size 256 flags after -- go to Megatron
#
# Every run starts the training afresh in a clean folder; --resume goes on from the last checkpoint instead.
# docs/quickstart.md says more.
set -euo pipefail
scripts=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
if [[ ${1:-} == --version ]]; then exec "$scripts/lib/version.sh" quickstart.sh; fi
"$scripts/setup.sh"
exec "$scripts/../.venv/bin/python" "$scripts/quickstart.py" "$@"
