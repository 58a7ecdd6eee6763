"""Layer 2, in-step recovery: an iteration finishes with exactly its microbatches, whoever dies.  No Megatron in here.

step.py           the state machine of one iteration: start here
recovery.py       a worker's part in the run: epochs, decisions tried again, what becomes of an orphan
plan.py           what an epoch decides, from what its members joined with (pure): who stands where, new replicas
spare.py          a live worker without a place, until it has one again (docs/regroup.md)
transfer.py       a worker's state on its way to another one
gradients.py      buckets on their way through the rings, and the tail that carries losses and the audit
generation.py     the groups that live and die with one epoch
process_group.py  torch process groups that outlive their members, for the traffic between steps
replica_group.py  torch process groups of one replica, whose inside can be exchanged
inside.py         all of these of a worker: ended from another thread, made anew among other workers
hooks.py          what is asked of the training framework at turning points
grid.py, faults.py, errors.py   who stands where; whose fault an exception is; what ends a worker's part
"""
