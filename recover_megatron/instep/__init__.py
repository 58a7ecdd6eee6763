"""Layer 2, in-step recovery: an iteration finishes with exactly its microbatches, whichever workers die.

This package does not import Megatron.  `manager` is the interface and defines the order of the calls: start there.
Next to it are `trainer` (input and result of a step), `decision` (the plan's records) and `faults` (errors).  `step` is
the state machine of one iteration.  `recovery` creates the parts of a worker's recovery; the folders `meeting`,
`groups` and `state` contain these parts.
"""
