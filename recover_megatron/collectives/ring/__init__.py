"""Fault-tolerant ring: schedule (pure functions), executor, and the group that callers use."""
