"""Layer 1: fault-tolerant collectives of the workers of one epoch, over a ring or NCCL.  See docs/ring.md.

group             interface to layer 2: the group of one column in one epoch
group_factory     opens a group; the only module that imports all kinds of groups and transports
ledger            gradient bucket, state of its elements (LOCAL or REDUCED), saved sums
ring              schedule: the ring's messages (pure functions); executor: the group that sends the messages
progress          thread that runs the collectives of groups
native            group that sums with the collectives of a library (NCCL)
transport         messages of a ring over TCP and shared memory; GPU tensors go through host memory
nccl              NCCL communicators opened with nccl4py: backend of a group, transfers of states between GPUs
gloo              abort of a gloo group, and exchange of its members; gloo itself has neither (docs/ring.md)
tree              collectives for small data over a tree of TCP connections
epoch             interface of an epoch, token that cancels a group, errors, wait for a key of a store
peers             clients for the peer stores of other workers, reachability tests
comparison        refusal of workers whose flags or program differ from the run's
state             state of a worker as a tree, and its transfer to other workers
column            data parallelism without Megatron, also with hybrid sharding
"""
