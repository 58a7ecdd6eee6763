"""Distributed optimizer: shards, their shadows, checkpoints."""
