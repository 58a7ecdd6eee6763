"""Layer 2, in-step recovery: an iteration finishes with exactly its microbatches, whoever dies.  No Megatron in here.

`manager` is the interface, with the contract of who calls what when: start there.  Beside it the interface is `faults`
(errors), `decision` and `grid` (the plan's records), `step` and `gradients` (what a step needs of whoever trains),
`trees` (states) and `out_of_turn`.  `step` is the state machine of one iteration, too.  `recovery` puts together the
parts of a worker, which are in the folders `meeting`, `groups` and `state`.
"""
