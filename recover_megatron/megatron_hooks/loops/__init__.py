"""The training loops that this package knows, each as a ``recover_megatron.integrate.Loop``."""
