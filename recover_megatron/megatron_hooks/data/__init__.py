"""Microbatches by their number, and the processes that read them ahead."""
