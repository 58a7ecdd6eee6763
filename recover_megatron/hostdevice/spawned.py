"""Runner of a script under the host device; spawned processes import it as their main module (see script.py)."""

from recover_megatron import hostdevice
from recover_megatron.hostdevice.script import Runner

RUNNER = Runner(
    "recover_megatron.hostdevice",
    "Run a Megatron-LM training script on the host, without a GPU (docs/hostdevice.md).",
    hostdevice.activate,
)

if __name__ == "__mp_main__":
    RUNNER.again(globals())
