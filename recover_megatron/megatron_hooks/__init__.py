"""Everything that knows Megatron: the only package here that imports it.

versions    which Megatron this is, where it came from, and the errors for one that is not supported
seams       how a Megatron function or method is wrapped: checked for its expected signature first
flags       what is refused before any process group is made, all reasons at once
refused     flags of Megatron's that --recover refuses, and why
gpt_script  the parts of Megatron-LM's pretrain_gpt.py, for the wheel, which has none
program     picks the script's parts (a checkout's own, or gpt_script) and calls Megatron's pretrain()
patched     what a patched Megatron calls (docs/patches.md): the same for the script that trains with it

With --recover (docs/instep.md follows a gradient through them)::

    fault_tolerance  puts the following together; what each end of a worker means
    training         the loop: what is a step, what is a section; how it is left and entered again
    places, state    a worker takes a place; what it gets for it from another one (docs/regroup.md)
    alone            Megatron built by one worker for another position, while the others train
    trainer          one step on Megatron's own schedule, with any microbatches, as often as needed
    buckets          where Megatron would sum a gradient bucket
    groups, layout   process groups that reach over replicas; which workers are a replica
    data, rng        the samples and the random numbers of a microbatch, by its number
    accumulated      how many microbatches entered the gradient, counted where it happens
    balancing        fewer microbatches for a slow replica (--recover-balance)
    records          steps.jsonl and events.jsonl

Importing this package imports no Megatron; its modules do.
"""
