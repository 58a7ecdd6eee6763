"""Connections between the processes of a run: message frames, authentication, forked processes, unreachable hosts.

The server and the clients of the control plane (``membership``) use this package, too. Standard library and msgspec
only.
"""
