"""Everything that knows Megatron: the only package here that imports it.

monkeypatch       which Megatron this is; how a function of it is wrapped: checked for its expected signature first
loops             the training loops: Megatron-LM's, Megatron-Bridge's (docs/integrate.md)
refused           flags of Megatron's that --recover refuses, and why
patched           what a patched Megatron calls (docs/patches.md): entry.program for the script that trains with it
entry.flags       what is refused before any process group is made, all reasons at once
entry.gpt_script  the parts of Megatron-LM's pretrain_gpt.py, for the wheel, which has none
entry.program     picks the script's parts (a checkout's own, or gpt_script) and calls Megatron's pretrain()

With --recover (docs/instep.md follows a gradient through them)::

    entry.fault_tolerance       puts the following together; what each end of a worker means
    training, evaluation        the loop: what is a step, what is a section
    rejoin                      an orphan's way out of the loop and back into it, in another position perhaps
    between_steps               who is there for the next step; fewer microbatches for a slow replica
    state, state_exchange       a worker's state; given to another one, taken over, mirrored (docs/regroup.md)
    trainer                     one step on Megatron's own schedule, with any microbatches, as often as needed
    buckets                     where Megatron would sum a gradient bucket
    groups, layout              process groups that reach over replicas; which workers are a replica
    data, order                 the samples of a microbatch, by its number
    microbatches                its random numbers, by the same; how many entered the gradient, counted where it happens
    checkpoints                 a checkpoint is a decision, each attempt in a folder of its own
    checkpoint_writers          nobody waits for ever for one that is written; all know whose part is missing
    optimizer                   the distributed optimizer: shards, shadows, checkpoints (docs/sharded.md)
    layer_sums                  what routers and attention add up over microbatches
    records, trackers, writers  what is logged, and by whom when the writer dies
    children                    loaders, writers, managers: deaf to what is meant for the worker
    turning_points              what Megatron does when the plan changes; faults on demand

Importing this package imports no Megatron; its modules do.
"""
