"""Transports of a ring: TCP and shared memory; discovery and authentication of neighbours."""
