"""Layer 3, the versatile workload: who runs which microbatches, with whoever is alive.  Stdlib only.

Pure functions: no I/O, no clock, no random numbers.  Every worker that calls one with the same arguments gets the same
answer, so a plan needs to be agreed on only in its inputs.  Replicas are always taken in the order of their ids,
whatever the order of the arguments.

quotas    how many microbatches each replica runs: `quotas`, `balance`
assign    which ones: `assign` for a whole iteration, `reassign` for those that a dead replica left
placement orphans and spares put together into new replicas: `assemble`; who should change position for more: `teams`
shards    who holds which part of a state that is spread over a column: `shards`
"""

from recover_megatron.workload.assign import assign, reassign
from recover_megatron.workload.placement import Candidate, Placement, Shape, assemble
from recover_megatron.workload.quotas import balance, quotas

__all__ = ["Candidate", "Placement", "Shape", "assemble", "assign", "balance", "quotas", "reassign"]
