"""recover_megatron: resilient pre-training for Megatron-LM.

GPUs die in the middle of a step; the step finishes anyway, on the survivors, with exactly the microbatches it would
have had.  docs/architecture.md shows the layers and the road of one gradient through them.

Importing this package imports neither torch nor Megatron: each layer imports what it needs, when it is used.
"""

__version__ = "0.1.0"
