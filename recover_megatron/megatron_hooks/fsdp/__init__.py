"""Megatron-FSDP: a replica is a shard group; what crosses replicas is the sum of each worker's shards of gradients."""
