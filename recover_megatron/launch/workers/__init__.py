"""Processes of one node: their start, supervision, replacement and end, and their output."""
