#!/usr/bin/env bash
# Check recover_megatron on one NVIDIA GPU, in about 15 minutes, and print a table: check | result | seconds | number.
#
#   scripts/gpu_checks.sh [--keep DIR [--resume]] | --help       in an installed package: recover-tools gpu-checks ...
#
# DIR: logs, runs and results, to send with the table; --resume: only the checks that have not passed there yet.
# Exit status: 0 all checks that could run passed, 1 a check failed, 3 no check could run (no GPU).
# RECOVER_GPU_PYTHON=PYTHON: use this Python and its torch instead of .venv; RECOVER_GPU_PACKAGES=DIR: packages that it
# lacks (docs/gpu.md: without a network).
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
