"""Launchers of several nodes, their store, and the coordinators that they host."""
