"""Layer 2, in-step recovery: an iteration finishes with exactly its microbatches, whoever dies.  No Megatron in here.

`manager` is the interface, with the contract of who calls what when: start there.  `step` is the state machine of one
iteration.  `recovery` puts a worker's parts together, which are in the folders: `meeting`, `groups`, `state`.
"""
