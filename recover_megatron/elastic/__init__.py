"""The library without Megatron: data-parallel training whose steps are finished when workers die in them.

    from recover_megatron import ElasticDataParallel, StepResult, run

data_parallel    `ElasticDataParallel`: a model and an optimizer, one step at a time; `run`: all steps, and the end
checks           what a model and an optimizer must be, before the first step
gradients        the gradients of a step, in memory that the workers sum
state            the state of a run, given to workers that come; which worker runs which microbatch

docs/library.md has the promises, a worked example and torchft's names beside ours.
"""

from recover_megatron.elastic.data_parallel import ElasticDataParallel, StepResult, run

__all__ = ["ElasticDataParallel", "StepResult", "run"]
