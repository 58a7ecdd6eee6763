"""``python -m recover_megatron.hostdevice [-m] SCRIPT [ARGUMENTS...]``: run a stock Megatron script without a GPU."""

import sys

from recover_megatron.hostdevice.spawned import RUNNER

if __name__ == "__main__":
    sys.exit(RUNNER.main(sys.argv[1:]))
