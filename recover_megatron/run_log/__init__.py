"""Files in a run's log folder, written line by line. Standard library only.

The hooks and fault injection write these files, and the viewers (``report``, ``status``) read them. This package
imports none of these users.
"""
