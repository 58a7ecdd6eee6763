"""Layer 2, in-step recovery: an iteration finishes with exactly its microbatches, whoever dies.  No Megatron in here.

step.py           the state machine of one iteration: start here
recovery.py       a worker's part in the run: puts the following ones together
hooks.py          what is asked of the training framework; the number of a worker's decision, and what it does in it
assignment.py     the present epoch's decision, and its place in it: groups, mates, microbatches
planner.py        joins an epoch, works out what it decides, knows who was lost when
rendezvous.py     meets the others and takes up their plan; boundaries before steps, decisions other than steps
orphan.py         leaves the training when its replica is broken, waits, comes back
spare.py          a live worker without a place, and what can become of it
no_place.py       workers with other flags than the run, and places that a worker could not take
attempts.py       folders of checkpoints: each attempt in one of its own until it is complete
announcements.py  what others are told of operations between decisions
decision.py       what a worker joins an epoch with, and what the epoch decides: data
plan.py           what an epoch decides, from what its members joined with (pure): who runs what
standing.py       who stands where in it, and which nodes it does without (pure)
timelines.py      when a run goes back, to what (pure)
blame.py          whether this worker's mates may be to blame for what it met
edges.py          whom this worker can reach
losses.py         who was lost, where, in what; the lines that tell people
gradients.py      buckets on their way through the rings, the tail that carries losses and the audit, the parameters
shards.py         the optimizer's state in parts: which worker's part is where, and how parts change hands
overlap.py        parameters that arrive while the next forward pass runs
state_holder.py   a worker's state as text and tensors, offered in chunks to all who connect
state_receiver.py a state that comes from several holders at once
snapshots.py      the snapshots that a worker keeps in host memory
snapshot_parts.py what a snapshot in memory is made of, and the memory that there is for it
epoch_groups.py   the groups that live and die with one epoch
process_group.py  torch process groups that outlive their members
traffic.py        what an operation on one of them does, by where the training is; by whom it is carried out
exchange.py       operations of some workers over their replicas, outside of decisions: each once
staging.py        on what such an operation is carried out
model_parallel_groups.py   the groups inside a replica: ended from another thread, made again among other workers
grid.py           the places of a run
faults.py         whose fault an exception is; what ends a worker's part; a device that has failed
"""
