"""Layer 1: an epoch's process group, the fault-tolerant ring, the ledger.  See docs/ring.md.

group             what layer 2 calls: the group of one column in one epoch
group_factory     opens it: the one place that knows the kinds of group and transport
ledger            a gradient bucket, which of its elements are LOCAL or REDUCED, and sums that are set aside
ring              schedule (pure), executor: the ring as a group, progress: the thread of a group
native            the backend's own collectives behind the same interface
transport         what carries a ring's messages: TCP and shared memory, host memory for a device without NCCL
nccl              communicators of our own by nccl4py, and both kinds of group over them
gloo              what gloo cannot do: be aborted, change its members (docs/ring.md)
tree              operations of some members over connections of their own
epoch             what a group knows of the membership, the token that cancels it, the errors, waiting for a key
peers             how members find each other, read from each other, and try whether they can be reached
comparison        what workers were started with, and which of them differ
state             the state of a worker as a tree, and its way to other workers
column            data parallelism on top of it, without Megatron; with hybrid sharding, too
"""
