"""Model and optimizer states: which worker holds which shard, and how a state travels to a worker that needs it.

`holder` gives and `receiver` takes; `shards` says who holds what.  `snapshots` are copies in the memory of other
workers, `overlap` is the parameters' way while the next forward pass runs.
"""
