"""Main module of processes that are spawned by a script on the host device (see script.py)."""

from recover_megatron import hostdevice
from recover_megatron.hostdevice.script import Runner

RUNNER = Runner(
    "recover_megatron.hostdevice",
    "Run a Megatron-LM training script on the host, without a GPU (docs/hostdevice.md).",
    hostdevice.activate,
)

if __name__ == "__mp_main__":
    RUNNER.again(globals())
