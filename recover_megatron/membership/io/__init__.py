"""Sockets, threads and files around the state machines: the server, a worker's session, the lease and the testimony."""
