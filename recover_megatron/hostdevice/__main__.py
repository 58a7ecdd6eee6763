"""``python -m recover_megatron.hostdevice [-m] SCRIPT [ARGUMENTS...]``: a stock Megatron script without a GPU."""

from __future__ import annotations

import sys

from recover_megatron import __version__
from recover_megatron.errors import end_process
from recover_megatron.hostdevice import script

USAGE = "usage: python -m recover_megatron.hostdevice [-m] SCRIPT [ARGUMENTS...]"


def main(arguments: list[str]) -> int:
    """Run the script; 2 where the command line is wrong or the script missing, else what the script does."""
    if arguments[:1] in (["-h"], ["--help"]):
        print(f"{USAGE}\n\nRun a Megatron-LM training script on the host, without a GPU (docs/hostdevice.md).")
        return 0
    if arguments[:1] == ["--version"]:
        print(f"recover_megatron.hostdevice {__version__}")
        return 0
    kind = "path"
    if arguments[:1] == ["-m"]:
        kind, arguments = "module", arguments[1:]
    if not arguments or arguments[0].startswith("-"):
        print(USAGE, file=sys.stderr)
        return 2
    try:
        script.run(f"{kind}:{arguments[0]}", arguments[1:])
    except script.ScriptMissing as problem:
        print(f"[hostdevice] {problem}", file=sys.stderr)
        return 2
    end_process()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
