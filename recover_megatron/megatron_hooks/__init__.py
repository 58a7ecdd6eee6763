"""Everything that knows Megatron: the only package here that imports it.

versions    which Megatron this is, where it came from, and the errors for one that is not supported
seams       how a Megatron function or method is wrapped: checked for its expected signature first
flags       what is refused before any process group is made, all reasons at once
gpt_script  the parts of Megatron-LM's pretrain_gpt.py, for the wheel, which has none
program     picks the script's parts (a checkout's own, or gpt_script) and calls Megatron's pretrain()
audit       which microbatches entered the gradient, recorded where it happens; steps.jsonl

Importing this package imports no Megatron; its modules do.
"""
