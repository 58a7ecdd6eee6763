"""Transfer of a worker's state, a tree of values and tensors; a *holder* has the state and sends it to a *receiver*."""
