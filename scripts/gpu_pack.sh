#!/usr/bin/env bash
# Collect what scripts/gpu_checks.sh needs beside torch and numpy, for a machine that has a GPU and no network.
#
#   scripts/gpu_pack.sh DIR        or --version; DIR is made, or filled again; about 90 MB
#
# There: RECOVER_GPU_PYTHON=python3 RECOVER_GPU_PACKAGES=DIR scripts/gpu_checks.sh
# The wheels are those of this machine's kind of processor and of the Python in RECOVER_GPU_VERSION (3.12).
set -euo pipefail
scripts=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
root=$(dirname -- "$scripts")
if [[ ${1:-} == --version ]]; then exec "$scripts/lib/version.sh" gpu_pack.sh; fi
if (($# != 1)) || [[ $1 == -* ]]; then
    printf 'usage: scripts/gpu_pack.sh DIR\n' >&2
    exit 2
fi
if [[ ! -x $root/.venv/bin/python ]]; then "$scripts/setup.sh"; fi
version=${RECOVER_GPU_VERSION:-3.12}
# Not torch, which a GPU's image has with its CUDA, and not numpy, which comes with it.
packages=(megatron-core 'nccl4py>=0.6,<0.7' cuda-core 'cuda-bindings>=13,<14' cuda-pathfinder packaging
    jinja2 markupsafe rich markdown-it-py mdurl pygments einops nvidia-ml-py psutil)
"$root/.venv/bin/python" -m pip install --quiet --upgrade --no-deps --only-binary :all: --python-version "$version" \
    --constraint "$scripts/constraints.txt" --target "$1" "${packages[@]}"
du -sh -- "$1" >&2
