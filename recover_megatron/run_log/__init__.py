"""What a run writes into its log folder, line by line.  Standard library only.

steps   steps.jsonl: one line per committed iteration; its writer and its reader
events  events.jsonl: what happened, one line each; its writer and its reader
audit   whether every microbatch of a run was counted exactly once
tail    reading on from where a file was read last; reading and cutting steps.jsonl at its end

The hooks and fault injection write by it; the viewers (``report``, ``status``) read by it and are imported by none.
"""
