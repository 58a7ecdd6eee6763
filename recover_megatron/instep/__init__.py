"""Layer 2, in-step recovery: an iteration finishes with exactly its microbatches, whoever dies.  No Megatron in here.

`manager` is the interface, with the contract of who calls what when: start there.  Beside it the interface is `faults`
(errors), `decision` and `grid` (the plan's records), `step` and `gradients` (what a step needs of whoever trains), and
`trees` (states).  `step` is also the state machine of one iteration.  `recovery` puts a worker's parts together, which
are in the folders `meeting`, `groups` and `state`.
"""
