"""Layer 2, in-step recovery: an iteration finishes with exactly its microbatches, whoever dies.  No Megatron in here.

step.py           the state machine of one iteration: start here
recovery.py       a worker's part in the run: epochs, decisions tried again, boundaries, what becomes of an orphan
spare.py          a live worker without a place, and what can become of it
plan.py           what an epoch decides, from what its members joined with (pure): who stands where, who runs what
shares.py         which microbatches each replica runs in a step
losses.py         who was lost when
marks.py          progress marks: what a worker does
gradients.py      buckets on their way through the rings, and the tail that carries losses and the audit
transfer.py       a worker's state on its way to another one
generation.py     the groups that live and die with one epoch
process_group.py  torch process groups that outlive their members, for the traffic between steps
exchange.py       operations of some workers over their replicas, outside of decisions: each once
staging.py, among.py   on what, and by whom, such an operation is carried out
replica_group.py  torch process groups inside a replica, whose inside can be exchanged
inside.py         all of those of one worker: ended from another thread, made again among other workers
hooks.py          what is asked of the training framework at turning points
grid.py, faults.py, errors.py   the places of a run; whose fault an exception is; what ends a worker's part
"""
