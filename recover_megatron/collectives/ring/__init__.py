"""The fault-tolerant ring: schedule (pure), executor, progress thread, and the group that callers see."""
