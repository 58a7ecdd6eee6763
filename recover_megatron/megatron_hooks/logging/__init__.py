"""What a run leaves for people: the run's records, Megatron's own log and its writers, and dumps of layers."""
