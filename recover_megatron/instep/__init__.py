"""Layer 2, in-step recovery: an iteration finishes with exactly its microbatches, whoever dies.  No Megatron in here.

step.py           the state machine of one iteration: start here
recovery.py       a worker's part in the run: puts the following ones together
hooks.py   the number of its decision, and what it does in it
assignment.py     the present epoch's decision, and its place in it: groups, mates, microbatches
planner.py        joins an epoch, works out what it decides, knows who was lost when
rendezvous.py     meets the others and takes up their plan
orphan.py         leaves the training when its replica is broken, waits, comes back
spare.py          a live worker without a place, and what can become of it
rendezvous.py       decisions other than steps, run again after a loss
rendezvous.py       before a step: where new replicas come in
announcements.py  what others are told of operations between decisions
decision.py       what a worker joins an epoch with, and what the epoch decides: data
plan.py           what an epoch decides, from what its members joined with (pure): who stands where, who runs what
edges.py          whom this worker can reach
gradients.py      buckets on their way through the rings, and the tail that carries losses and the audit
state_holder.py       a worker's state as text and tensors, and its digest
state_holder.py   states that are offered: cut in chunks, served to whoever connects
state_receiver.py a state that comes from several holders at once
epoch_groups.py   the groups that live and die with one epoch
process_group.py  torch process groups that outlive their members
traffic.py        what an operation on one of them does, by where the training is
exchange.py       operations of some workers over their replicas, outside of decisions: each once
staging.py, traffic.py   on what, and by whom, such an operation is carried out
model_parallel_groups.py   the groups inside a replica: ended from another thread, made again among other workers
hooks.py          what is asked of the training framework at turning points
grid.py, faults.py, faults.py   the places of a run; whose fault an exception is; what ends a worker's part
"""
