"""Runner of a training script on an unpatched Megatron.

A process that the script spawns imports this module as its main module.
"""

from recover_megatron.hostdevice.script import Runner
from recover_megatron.megatron_hooks import patched

RUNNER = Runner(
    "recover_megatron.megatron_hooks",
    "Run a training script that calls Megatron-LM's pretrain(), with support for --recover (docs/integrate.md).",
    patched.as_imported,
    patched.say_if_unprotected,
)

if __name__ == "__mp_main__":
    RUNNER.again(globals())
