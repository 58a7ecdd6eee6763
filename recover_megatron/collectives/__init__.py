"""Layer 1: an epoch's process group, the fault-tolerant ring, the ledger.  See docs/ring.md.

group             what layer 2 calls: the group of one column in one epoch
group_factory     opens it: the one place that knows the kinds of group and transport
bucket, ledger    a gradient bucket, and which of its elements are LOCAL or REDUCED
ring              schedule (pure), executor, progress thread: the ring as a group
native            the backend's own collectives behind the same interface
transport         what carries a ring's messages: TCP and shared memory, host memory for a device without NCCL
nccl              communicators of our own by nccl4py, for both kinds of group
gloo              what gloo cannot do: be aborted, change its members (docs/gloo.md)
epoch             what a group knows of the membership, and the token that cancels it
peer_store_client, peer_read, rendezvous   how members find each other, and read from each other
probe             whether other workers can be reached
column              data parallelism on top of it, without Megatron
shard_group       hybrid sharding: what of the workers is a replica, and what becomes of a broken one
"""
