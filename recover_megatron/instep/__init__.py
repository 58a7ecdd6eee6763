"""Layer 2, in-step recovery: an iteration finishes with exactly its microbatches, whichever workers die.

This package does not import Megatron.  `manager` is the interface and defines who calls what when: start there.  Next
to it are `trainer` (input and result of a step), `decision` (the plan's records) and `faults` (errors).  `step` is the
state machine of one iteration.  `recovery` assembles the parts of a worker, which are in the folders `meeting`,
`groups` and `state`.
"""
