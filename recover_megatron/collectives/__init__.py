"""Layer 1: process group of an epoch, fault-tolerant ring, ledger.  See docs/ring.md.

group             interface to layer 2: the group of one column in one epoch
group_factory     opens a group; the only module that knows all kinds of group and transport
ledger            gradient bucket, LOCAL or REDUCED state of its elements, saved sums
ring              schedule (pure functions), executor: the ring as a group, progress: the thread of a group
native            the backend's own collectives behind the same interface
transport         messages of a ring: TCP and shared memory; host memory for a GPU
nccl              NCCL communicators opened with nccl4py, and both kinds of group over them
gloo              what gloo lacks: abort, change of members (docs/ring.md)
tree              collectives of some members over dedicated connections
epoch             membership as a group sees it, the token that cancels a group, errors, waiting for a key
peers             discovery of members, reads from them, reachability tests
comparison        flags and program that workers were started with, and which workers differ
state             state of a worker as a tree, and its transfer to other workers
column            data parallelism on top of these modules, without Megatron; also with hybrid sharding
"""
