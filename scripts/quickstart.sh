#!/usr/bin/env bash
# Train a small GPT on real text on this machine, with or without a GPU, and kill -9 a worker in the middle of a step:
# setup, corpus, training, the same training without a death, report.
#
#   scripts/quickstart.sh                      4 data-parallel workers, a few minutes; results in runs/quickstart
#   scripts/quickstart.sh --help               list the options
#   scripts/quickstart.sh -- --hidden-size 256 flags after -- go to Megatron
#
# Every run starts a new training in an empty folder; --resume continues from the last checkpoint instead.
# See docs/quickstart.md.
set -euo pipefail
scripts=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
if [[ ${1:-} == --version ]]; then exec "$scripts/lib/version.sh" quickstart.sh; fi
"$scripts/setup.sh"
exec "$scripts/../.venv/bin/python" "$scripts/quickstart.py" "$@"
