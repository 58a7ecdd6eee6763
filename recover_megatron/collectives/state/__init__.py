"""Transfer of a worker's state, a tree of values and tensors, from workers that have it (holders) to receivers."""
