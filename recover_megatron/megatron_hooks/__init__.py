"""Everything that knows Megatron: the only package here that imports it.

monkeypatch       how a function of Megatron-Core is wrapped: checked for its expected signature first
loops             the training loops: Megatron-LM's, Megatron-Bridge's (docs/integrate.md)
refused           flags of Megatron's that --recover refuses, and why
patched           what a patched Megatron calls (docs/patches.md): entry.program for the script that trains with it
entry.versions    which Megatron this is, where it came from, and the errors for one that is not supported
entry.flags       what is refused before any process group is made, all reasons at once
entry.gpt_script  the parts of Megatron-LM's pretrain_gpt.py, for the wheel, which has none
entry.program     picks the script's parts (a checkout's own, or gpt_script) and calls Megatron's pretrain()

With --recover (docs/instep.md follows a gradient through them)::

    entry.fault_tolerance       puts the following together; what each end of a worker means
    training, evaluation        the loop: what is a step, what is a section
    rejoin                      an orphan's way out of the loop and back into it
    state, state_exchange       a worker's state; given to another one, taken over, mirrored (docs/regroup.md)
    detached_build              Megatron built by one worker for another position, while the others train
    trainer                     one step on Megatron's own schedule, with any microbatches, as often as needed
    buckets                     where Megatron would sum a gradient bucket
    groups, layout, known       process groups that reach over replicas; which workers are a replica
    data, rng                   the samples and the random numbers of a microbatch, by its number
    accumulated                 how many microbatches entered the gradient, counted where it happens
    checkpoints                 a checkpoint is a decision, each attempt in a folder of its own
    optimizer                   the distributed optimizer: shards, shadows, checkpoints (docs/sharded.md)
    balancing                   fewer microbatches for a slow replica (--recover-balance)
    records, trackers, totals, writers   what is logged, and by whom when the writer dies
    children                    loaders, writers, managers: deaf to what is meant for the worker
    turning_points, fault_injection      what Megatron does when the plan changes; faults on demand

Importing this package imports no Megatron; its modules do.
"""
