"""Checkpoints of a run that loses workers, and the states that its workers give each other."""
