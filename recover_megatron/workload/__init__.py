"""Layer 3, the versatile workload: who runs which microbatches, with whoever is alive.  Stdlib only.

Pure functions: no I/O, no clock, no random numbers.  Every worker that calls one with the same arguments gets the same
answer, so a plan needs to be agreed on only in its inputs.  Replicas are always taken in the order of their ids,
whatever the order of the arguments.  What each module decides: docs/workload.md.
"""

from recover_megatron.workload.assign import assign, reassign
from recover_megatron.workload.placement import Candidate, Placement, Shape, assemble, openings
from recover_megatron.workload.quotas import Balance, quotas

__all__ = ["Balance", "Candidate", "Placement", "Shape", "assemble", "assign", "openings", "quotas", "reassign"]
