"""Abort of gloo groups, and exchange of their members; gloo itself supports neither (docs/ring.md)."""
