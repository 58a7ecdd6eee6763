"""Library without Megatron: data-parallel training whose steps are finished even if workers die in them.

    from recover_megatron import ElasticDataParallel, StepResult, run

data_parallel    `ElasticDataParallel`: a model and an optimizer, one step at a time
steps            result of a finished step; `run`: all steps, and the end of the training
checks           requirements on model and optimizer, checked before the first step
passes           forward and backward passes of a worker's microbatches
generators       random numbers that do not depend on the worker that draws them
gradients        gradients of a step, in memory that the workers sum
leading          functions that one worker calls for all
restoring        bit-exact loading of a state; names the values that a load has changed
standing         statuses with which workers join: holders of the state, distribution of microbatches
state            state of a run, and its transfer to new workers
verification     comparison of the states of all workers

docs/integrate.md has the promises, a worked example and a table of torchft's names and ours.
"""

from recover_megatron.elastic.data_parallel import ElasticDataParallel
from recover_megatron.elastic.steps import StepResult, run

__all__ = ["ElasticDataParallel", "StepResult", "run"]
