#!/usr/bin/env bash
# Check recover_megatron on one NVIDIA GPU, in some 15 minutes, and print a table: check | result | seconds | number.
#
#   scripts/gpu_checks.sh [--keep DIR [--resume]] | --help       of an installed package: recover-tools gpu-checks ...
#
# DIR: logs, runs and results, to be sent with the table; --resume: only the checks that have not passed there yet.
# Exit status: 0 all that could be run passed, 1 one failed, 3 nothing could be run (no GPU).
# RECOVER_GPU_PYTHON=PYTHON: with this Python and its torch instead of .venv; what it lacks comes from
# RECOVER_GPU_PACKAGES=DIR (docs/gpu.md: without a network).
set -euo pipefail
scripts=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
root=$(dirname -- "$scripts")
if [[ ${1:-} == --version ]]; then exec "$scripts/lib/version.sh" gpu_checks.sh; fi
python=${RECOVER_GPU_PYTHON:-}
if [[ -z $python ]]; then
    python=$root/.venv/bin/python
    if [[ ! -x $python ]]; then "$scripts/setup.sh"; fi
fi
packages=${RECOVER_GPU_PACKAGES:+:$(realpath -- "$RECOVER_GPU_PACKAGES")}
export PYTHONPATH=$root$packages${PYTHONPATH:+:$PYTHONPATH}
exec "$python" "$scripts/gpu_checks.py" "$@"
