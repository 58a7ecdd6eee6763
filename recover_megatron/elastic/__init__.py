"""The library without Megatron: data-parallel training whose steps are finished when workers die in them.

    from recover_megatron import ElasticDataParallel, StepResult, run

data_parallel    `ElasticDataParallel`: a model and an optimizer, one step at a time
steps            what a finished step gives; `run`: all steps, and the end
checks           what a model and an optimizer must be, before the first step
passes           the forward and backward passes of a worker's microbatches
generators       random numbers that do not depend on which worker draws them
gradients        the gradients of a step, in memory that the workers sum
leading          what one worker does for all
restoring        a state is loaded bit for bit, or what has changed it is named
standing         what workers join with: whose state it is, which worker runs which microbatch
state            the state of a run, given to workers that come
verification     whether all workers have the same state

docs/integrate.md has the promises, a worked example and torchft's names beside ours.
"""

from recover_megatron.elastic.data_parallel import ElasticDataParallel
from recover_megatron.elastic.steps import StepResult, run

__all__ = ["ElasticDataParallel", "StepResult", "run"]
