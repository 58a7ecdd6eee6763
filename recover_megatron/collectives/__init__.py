"""Layer 1: an epoch's process group, the fault-tolerant ring, the ledger.  See docs/ring.md."""
