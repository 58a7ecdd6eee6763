"""All code that depends on Megatron: the only package here that imports it.

docs/architecture.md lists its modules in reading order, and what each wraps; docs/instep.md follows a gradient through
them.  Importing this package does not import Megatron; its modules do.
"""
