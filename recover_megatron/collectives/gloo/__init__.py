"""Abort of gloo groups, and exchange of their members, which gloo itself lacks; docs/ring.md gives the reasons."""
