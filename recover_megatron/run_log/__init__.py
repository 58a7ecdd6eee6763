"""Formats of the files in a run's log folder that have one JSON object per line. Standard library only.

The hooks and the fault injection write these files; ``report`` and ``status`` read them.
"""
