"""Connections between the processes of a run: framing, proof of the job's secret, forks, silent hosts.

    frames      a length and a JSON object: the one framing, with a limit before a byte is kept
    proof       the one way to prove the job's secret: HMAC-SHA256 over a purpose, a role and two fresh nonces
    addresses   "host port" as text, and sockets for it
    client      a blocking connection that frames, proves and gives up
    store       the peers' key-value store, and bytes that a worker gives to others: a server in a thread
    streams     connections that a store lets in and gives away: to who serves them, or waits for them
    silence     connections on which the other host acknowledges nothing any more are shut
    forks       a forked process closes what its parent holds open: the one at-fork hook
    kernel      what the kernel knows of a connection, and the limit of open files

The control plane's own server and client (``membership.server``, ``membership.client``) use these parts in selectors of
their own.  Standard library only.
"""
