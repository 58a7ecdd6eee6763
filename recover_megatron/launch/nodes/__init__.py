"""Cooperation of the launchers of several nodes, their store, and the coordinators that they host."""
