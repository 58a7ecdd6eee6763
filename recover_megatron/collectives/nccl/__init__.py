"""Gradients over NCCL communicators opened with nccl4py (NCCL's Python bindings), without torch's process groups."""
