"""The library for who has no Megatron: data-parallel training whose steps are finished when workers die in them.

    from recover_megatron import ElasticDataParallel, StepResult, run

data_parallel    `ElasticDataParallel`: a model and an optimizer, one step at a time, whoever dies in it
loop             `run`: all steps, and the exit code with which a worker ends
share            pure: who holds the state, who runs which microbatch
state            the state of a run as a tree, given to workers that come, and taken from others

docs/library.md has the promises, a worked example and torchft's names beside ours.
"""

from recover_megatron.elastic.data_parallel import ElasticDataParallel, StepResult, run

__all__ = ["ElasticDataParallel", "StepResult", "run"]
