"""What a run writes into its log folder, line by line.  Standard library only.

The hooks and fault injection write by it; the viewers (``report``, ``status``) read by it and are imported by none.
"""
