"""Microbatches by number, and the processes that prefetch them."""
