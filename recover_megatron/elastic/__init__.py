"""Data-parallel training without Megatron; a step is finished even if workers die during the step.

    from recover_megatron import ElasticDataParallel, StepResult, run

data_parallel    `ElasticDataParallel`: trains a model with an optimizer, one step at a time
steps            result of a finished step; `run`: loop over all steps, until the training is finished
checks           checks that model, optimizer and program are supported, and equal on all workers
passes           forward and backward passes of a worker's microbatches
generators       random numbers that do not depend on the worker that draws them
gradients        gradients of a step, in buckets that the workers sum
leading          functions that one worker calls for all workers
restoring        bit-exact loading of a state, and a check that the loaded values equal the sent values
epoch_start      statuses with which workers join an epoch; holders of the state, microbatches of each worker
run_state        state of a run, and its transfer to new workers
verification     comparison of the states of all workers

docs/integrate.md has the guarantees, a worked example, and a table of the names here and in torchft.
"""

from recover_megatron.elastic.data_parallel import ElasticDataParallel
from recover_megatron.elastic.steps import StepResult, run

__all__ = ["ElasticDataParallel", "StepResult", "run"]
