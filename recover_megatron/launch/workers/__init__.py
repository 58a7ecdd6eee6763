"""Processes of one node: start, watch, replacement and end, and their output."""
