"""NCCL communicators opened with nccl4py (NCCL's Python bindings), for sums of gradients and transfers of states."""
