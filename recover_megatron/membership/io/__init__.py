"""Sockets, threads and files around the state machines: server, worker's session, lease, witness."""
