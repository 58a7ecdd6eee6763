"""The distributed optimizer: its shards, their shadows, its checkpoints."""
