"""Model and optimizer states: which worker holds which shard (`shards`), and copies in the memory of other workers
(`snapshots`).  `overlap` is the parameters' way while the next forward pass runs.
"""
