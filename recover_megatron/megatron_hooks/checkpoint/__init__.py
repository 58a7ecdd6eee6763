"""Checkpoints of a run that loses workers, and the state that workers send each other."""
