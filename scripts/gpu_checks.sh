#!/usr/bin/env bash
# Check recover_megatron on one NVIDIA GPU, in under 8 minutes, and print a table: check | result | seconds | number.
#
#   scripts/gpu_checks.sh                 all checks; exit status 1 if one of them failed
#   scripts/gpu_checks.sh --keep DIR      logs and runs stay in DIR: send them with the table (docs/gpu.md)
#   scripts/gpu_checks.sh --help          the options
#
# Without a GPU the table says "not run" and the exit status is 0.  Needs no network but for scripts/setup.sh, which runs
# where there is no .venv.
set -euo pipefail
scripts=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
root=$(dirname -- "$scripts")
if [[ ${1:-} == --version ]]; then exec "$scripts/lib/version.sh" gpu_checks.sh; fi
if [[ ! -x $root/.venv/bin/python ]]; then "$scripts/setup.sh"; fi
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
exec "$root/.venv/bin/python" "$scripts/gpu_checks.py" "$@"
