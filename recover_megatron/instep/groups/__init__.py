"""Groups that outlive their members: those of an epoch (`epoch_groups`), and those inside a replica.

`model_parallel_groups` makes the latter.  A `process_group` of torch's stands for each of the former, whose operations
`traffic` carries out.  `exchange` is an operation of some workers outside of a decision.
"""
