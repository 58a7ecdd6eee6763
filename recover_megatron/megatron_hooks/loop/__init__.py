"""Megatron's training loops, and a worker's part in them: steps, evaluations, turning points, rejoining."""
