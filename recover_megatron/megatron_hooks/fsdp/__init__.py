"""Hooks for Megatron-FSDP: each replica is one shard group, and only gradient shards are summed over replicas."""
