"""Groups of a run that loses and replaces workers: groups of an epoch (`epoch_groups`) and groups inside a replica.

`model_parallel_groups` creates the groups inside a replica.  `process_group` is the torch group that represents a group
over replicas, and `traffic` carries out its operations.  `exchange` carries out operations outside of decisions.
"""
