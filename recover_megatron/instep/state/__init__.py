"""Model and optimizer states: which worker holds which shard (`shards`), and copies in the memory of other workers
(`snapshots`).  `overlap` gathers the parameters while the next forward pass runs.
"""
