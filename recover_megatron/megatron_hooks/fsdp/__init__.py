"""Megatron-FSDP: a replica is a shard group; only gradient shards are summed over replicas."""
