"""All code of recover_megatron that depends on Megatron; no other package of the project imports Megatron.

docs/architecture.md lists the modules of this package in reading order, with the functions of Megatron that each module
wraps; docs/instep.md follows a gradient through the modules.  Importing the package does not import Megatron; importing
its modules does.
"""
