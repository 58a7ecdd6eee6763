"""A training loop of ours with the modules, functions and parameters of Megatron-Bridge that recover_megatron wraps.

It trains a small GPT of Megatron-Core. ``tests/megatron_hooks/test_bridge.py`` holds its functions to the
recorded parameters of Bridge's own; it has no other resemblance to them.
"""
