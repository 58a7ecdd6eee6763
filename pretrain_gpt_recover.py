"""Pre-train GPT with Megatron-LM, as pretrain_gpt.py of Megatron-LM does.  With --recover, survive deaths of workers.

    recover-run --nproc-per-node 8 pretrain_gpt_recover.py <Megatron's flags> --recover

Accepts every flag of Megatron's pretrain_gpt.py.  Without --recover this script installs no hook, and does the same as
pretrain_gpt.py.  It needs the Megatron-Core wheel (0.19), or a Megatron-LM checkout (0.18 to 0.19) that is first on
PYTHONPATH.  `--help` lists all flags; the flags of recover_megatron are in the group "recover".  `--version`, as the
only argument, prints the version of recover_megatron.
"""

from __future__ import annotations

import sys

from recover_megatron import __version__
from recover_megatron.arguments import config_from_argv
from recover_megatron.errors import UserError, end_process, refuse
from recover_megatron.megatron_hooks.entry.program import choose_device, load

PROGRAM = "pretrain_gpt_recover.py"


def main() -> None:
    """Train; if the run cannot start, print all reasons and exit with EXIT_USAGE."""
    if sys.argv[1:] == ["--version"]:
        print(f"{PROGRAM} {__version__}")
        return
    try:
        program = load(config_from_argv(sys.argv[1:]))
        program.check()
        program.run()
    except UserError as error:
        refuse(PROGRAM, error.reasons)


if __name__ == "__main__":
    main()
    end_process()
elif __name__ == "__mp_main__":
    choose_device(config_from_argv(sys.argv[1:]))
