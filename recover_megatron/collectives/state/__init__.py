"""Transfer of workers' states, as trees of values and tensors, from holders to receivers."""
