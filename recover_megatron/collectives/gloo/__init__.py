"""Functions that gloo lacks: abort, and change of members.  docs/ring.md explains why, and until when."""
