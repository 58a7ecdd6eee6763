"""Formats of files with one JSON object per line in a run's log folder. Standard library only.

The hooks and the fault injection write these files; ``report`` and ``status`` read them. This package imports
none of these users.
"""
