"""Transports of a ring over TCP and shared memory, with the authentication of the neighbours."""
