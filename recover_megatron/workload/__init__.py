"""Layer 3, the versatile workload: who runs which microbatches, with whoever is alive.  Stdlib only.

Pure functions: no I/O, no clock, no random numbers.  Every worker that calls one with the same arguments gets the same
answer, so a plan needs to be agreed on only in its inputs.  Replicas are always taken in the order of their ids,
whatever the order of the arguments.

quotas    how many microbatches each replica runs: `quotas`
balance   the same by measured speeds: `Balance`
assign    which ones: `assign` for a whole iteration, `reassign` for those that a dead replica left
placement orphans and spares put together into new replicas: `assemble`; who should change position for more: `teams`
shards    who holds which part of a state that is spread over a column: `shards`
layout    where Megatron's order of ranks puts the workers of each replica: `replicas_of`
domains   what may be lost at once, and how far copies are kept apart for that: `stride_of`
node_losses  what the loss of each node of a launch would cost: `node_losses`
"""

from recover_megatron.workload.assign import assign, reassign
from recover_megatron.workload.balance import Balance
from recover_megatron.workload.placement import Candidate, Placement, Shape, assemble, openings
from recover_megatron.workload.quotas import quotas

__all__ = ["Balance", "Candidate", "Placement", "Shape", "assemble", "assign", "openings", "quotas", "reassign"]
