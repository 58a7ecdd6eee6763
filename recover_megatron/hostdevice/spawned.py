"""What a process spawned from a script under the host device imports as its main module (see script.py)."""

from recover_megatron.hostdevice import script

if __name__ == "__mp_main__":
    script.run_again(globals())
