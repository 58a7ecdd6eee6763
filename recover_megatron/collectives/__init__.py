"""Layer 1: fault-tolerant collectives of the workers of one epoch, over a ring or NCCL.  See docs/ring.md.

group             interface to layer 2: the group of one column in one epoch
group_factory     opens a group; the only module that knows all kinds of group and transport
ledger            gradient bucket, LOCAL or REDUCED state of its elements, saved sums
ring              schedule: the ring's messages (pure functions); executor: the group that sends them
progress          thread that carries out the collectives of groups
native            group that uses a backend's own collectives (NCCL)
transport         messages of a ring over TCP and shared memory; a GPU's tensors go through host memory
nccl              NCCL communicators opened with nccl4py, and their users: the backend of a group, transfers of states
gloo              abort and change of members, which gloo lacks (docs/ring.md)
tree              collectives of some members over dedicated connections
epoch             interface of an epoch, token that cancels a group, errors, wait for a key of a store
peers             discovery of members, reads from them, reachability tests
comparison        finds workers that were started with other flags or another program than the run
state             state of a worker as a tree, and its transfer to other workers
column            data parallelism with these modules, without Megatron; also with hybrid sharding
"""
