"""Layer 3, the versatile workload: which live replica runs which microbatches.  Stdlib only.

Pure functions: no I/O, no clock, no random numbers.  All workers that call a function with the same arguments get the
same result, so they need to agree only on the arguments.  Replicas are processed in the order of their ids, whatever
the order of the arguments.  docs/instep.md describes the decisions of each module.
"""

from recover_megatron.workload.assign import assign, reassign
from recover_megatron.workload.placement import Candidate, Placement, Shape, assemble, openings
from recover_megatron.workload.quotas import Balance, quotas

__all__ = ["Balance", "Candidate", "Placement", "Shape", "assemble", "assign", "openings", "quotas", "reassign"]
