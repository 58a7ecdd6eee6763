"""Megatron's training loops, and what a worker does in them: steps, evaluations, turning points, its way back."""
