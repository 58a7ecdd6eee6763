"""Everything that knows Megatron: the only package here that imports it.

docs/architecture.md has its modules in the order in which they are best read, and what each wraps; docs/instep.md
follows a gradient through them.  Importing this package imports no Megatron; its modules do.
"""
