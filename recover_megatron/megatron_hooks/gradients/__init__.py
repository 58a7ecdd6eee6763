"""Gradients from the backward pass to the summed bucket, and the maxima by which 8-bit numbers are scaled."""
