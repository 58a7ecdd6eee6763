"""Gradients over NCCL by communicators of our own (NCCL's Python bindings, nccl4py), without torch's process groups."""
