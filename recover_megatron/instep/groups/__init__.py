"""Groups that outlive their members: those of an epoch (`epoch_groups`), and those inside a replica.

`model_parallel_groups` makes the latter, each a `process_group` of torch's, whose operations `traffic` guards and
`out_of_turn` orders.  `exchange` is an operation of some workers outside of a decision.
"""
