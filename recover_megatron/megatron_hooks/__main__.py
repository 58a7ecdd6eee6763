"""``python -m recover_megatron.megatron_hooks [-m] SCRIPT [ARGUMENTS...]``: run a Megatron script with --recover."""

import sys

from recover_megatron.megatron_hooks.spawned import RUNNER

if __name__ == "__main__":
    sys.exit(RUNNER.main(sys.argv[1:]))
