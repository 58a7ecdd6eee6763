"""Checkpoints and snapshots of a run that loses workers, and the training state that workers send each other."""
