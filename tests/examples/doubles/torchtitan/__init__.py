"""A stand-in for torchtitan where it is not installed: the seams of its trainer that an adapter needs."""
