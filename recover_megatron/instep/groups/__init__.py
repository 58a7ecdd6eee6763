"""Groups that outlive their members: groups of an epoch (`epoch_groups`), and groups inside a replica.

`model_parallel_groups` creates the latter.  A torch `process_group` represents each of the former, and `traffic`
carries out its operations.  `exchange` is an operation of some workers outside of a decision.
"""
