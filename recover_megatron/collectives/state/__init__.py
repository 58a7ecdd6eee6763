"""States of workers on their way to other workers: as trees of values and tensors, from holders to receivers."""
