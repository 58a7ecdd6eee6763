"""A stand-in for torchtitan 0.3.0 where it is not installed: the seams of its trainer that an adapter needs."""
