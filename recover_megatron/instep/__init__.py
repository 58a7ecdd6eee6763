"""Layer 2, in-step recovery: an iteration finishes with exactly its microbatches, whoever dies.  No Megatron in here.

`step` is the state machine of one iteration: start there.  `recovery` puts a worker's parts together.
"""
