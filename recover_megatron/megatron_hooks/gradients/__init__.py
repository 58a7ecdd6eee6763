"""Gradients, from the pass that makes them to the bucket that is summed; and the values that scale 8-bit numbers."""
