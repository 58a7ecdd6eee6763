#!/usr/bin/env bash
# Megatron-Core and Python 3.14: the package installs, its parser of arguments cannot be built.
#
# Guess: megatron-core 0.19.2 says `Requires-Python: >=3.12`, so a training script parses its arguments on Python 3.14
#        as on 3.12.
# Seen:  the parser is not built, whatever the arguments are: a TypeError from argparse, since 0.19.2 gives
#        BooleanOptionalAction a `type`, which Python 3.14 no longer takes (3.12 and 3.13 warn).  So no script that calls
#        megatron.training's parse_args() starts.  The parsers of core_v0.18.2, core_v0.19.0 and of main (2026-08-22)
#        hold the same call.
# Run:   2026-11-28, Python 3.14.8, megatron-core 0.19.2, torch 2.15.0, Linux x86_64, no GPU.
#
#   PYTHON=python3.14 findings/megatron_arguments_python_314.sh     (about 6 GB in a temporary folder)
#
# Exit status 0: as seen; 1: it has changed; 2: no Python 3.14 here.
set -euo pipefail

python=${PYTHON:-python3.14}
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 14))' 2>/dev/null || {
    echo "needs Python 3.14 (PYTHON=PATH)" >&2
    exit 2
}
room=$(mktemp -d)
trap 'rm -rf -- "$room"' EXIT
"$python" -m venv "$room/venv"
"$room/venv/bin/pip" install -q --no-input torch==2.15.0 megatron-core==0.19.2 numpy==2.5.5 # no refusal by Requires-Python

cat >"$room/parse.py" <<'PY'
import sys

from megatron.training.arguments import parse_args

sys.argv = ["train.py"]
try:
    parse_args()
except TypeError as error:
    print("TypeError:", error)
else:
    print("parsed")
PY
seen=$("$room/venv/bin/python" -W ignore "$room/parse.py" 2>/dev/null | tail -n 1)
echo "$seen"
[[ $seen == "TypeError: BooleanOptionalAction.__init__() got an unexpected keyword argument 'type'" ]]
