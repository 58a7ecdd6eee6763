"""Gradients, from the backward pass to the bucket that is summed; and the maxima that scale 8-bit numbers."""
