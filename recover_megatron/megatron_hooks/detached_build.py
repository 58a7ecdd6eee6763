"""Megatron built by one worker alone, while the others train: a spare that is wanted in a position it has no model for.

pretrain() runs as at launch, with the rank of that position, up to train(): its groups hold nobody else (see `groups`),
so nothing is sent and nothing is waited for.  What it would learn from others there comes with the state later.

    load_checkpoint                      nothing is read: the state comes from a peer
    build_train_valid_test_data_loaders  whether there is data is what rank 0 says at launch: there is, they train
    append_to_progress_log               no job begins
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.training import get_args

from recover_megatron.instep.traffic import Mode
from recover_megatron.integrate import Loop
from recover_megatron.megatron_hooks.groups import Groups


def install(groups: Groups, loop: Loop) -> None:
    """Wrap the seams; ``groups`` know whether this worker is building without the others."""

    def no_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
        def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
            return (0, 0) if groups.alone else original(*args, **kwargs)

        return load_checkpoint

    def data_is_there(original: Callable[..., Any]) -> Callable[..., Any]:
        def build_train_valid_test_data_loaders(*args: Any, **kwargs: Any) -> Any:
            if groups.alone:
                get_args().do_train = True
            return original(*args, **kwargs)

        return build_train_valid_test_data_loaders

    def no_job_begins(original: Callable[..., Any]) -> Callable[..., Any]:
        def append_to_progress_log(*args: Any, **kwargs: Any) -> Any:
            # Not for good: with a place it waits for all others where they write of a checkpoint, as they do for it.
            return None if groups.traffic.mode is Mode.ALONE else original(*args, **kwargs)

        return append_to_progress_log

    loop.wrap("progress_log", no_job_begins)
    loop.wrap("load", no_checkpoint)
    loop.wrap("loaders", data_is_there)
