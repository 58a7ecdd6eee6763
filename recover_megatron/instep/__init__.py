"""Layer 2, in-step recovery: an iteration finishes with exactly its microbatches, whoever dies.  No Megatron in here.

`manager` is the interface, with the contract of who calls what when: start there.  Beside it the interface is `trainer`
(what a step is given and gives), `decision` (the plan's records) and `faults` (errors).  `step` is the state machine of
one iteration.  `recovery` puts together the parts of a worker, which are in the folders `meeting`, `groups` and
`state`.
"""
