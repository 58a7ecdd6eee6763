#!/usr/bin/env bash
# version.sh NAME: print "NAME VERSION" for --version of a script; needs no .venv.
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)
init=$root/recover_megatron/__init__.py
if [[ ! -e $init ]]; then init=$root/../__init__.py; fi # in an installed package
printf '%s %s\n' "$1" "$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' "$init")"
