"""Megatron's training loops, and a worker's part in them: steps, evaluations, hooks of in-step recovery, rejoining."""
