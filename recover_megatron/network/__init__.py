"""Connections between the processes of a run: framing, proof of the job's secret, forks, silent hosts.

The control plane's own server and client (``membership``) use these parts in their own selectors. Standard library
only.
"""
