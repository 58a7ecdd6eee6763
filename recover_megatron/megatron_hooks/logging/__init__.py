"""Output of a run: its record files, Megatron's own log and its writers, and dumps of layers."""
