"""A script on a Megatron without a patch; and what a process that it spawns imports as its main module."""

from recover_megatron.hostdevice.script import Runner
from recover_megatron.megatron_hooks import patched

RUNNER = Runner(
    "recover_megatron.megatron_hooks",
    "Run a training script that calls Megatron-LM's pretrain(); it takes --recover (docs/patches.md).",
    patched.as_imported,
    patched.say_if_unprotected,
)

if __name__ == "__mp_main__":
    RUNNER.again(globals())
