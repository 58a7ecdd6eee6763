"""Files in a run's log folder, written line by line. Standard library only.

The hooks and fault injection write with it; the viewers (``report``, ``status``) read with it, and it imports none of
them.
"""
