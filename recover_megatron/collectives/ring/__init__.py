"""Fault-tolerant ring: schedule of the messages (pure functions), and the executor and group that send them."""
