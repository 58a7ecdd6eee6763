"""A checkpoint by bucket is loaded into the pieces that workers are to hold, whoever they are: in place of the lost.

Megatron's own loading knows one layout, that of the launch: a shard for each rank, and no shadow.  While the run goes
back to a checkpoint (`rollback`) its optimizer asks for the pieces of another one, and gets them; what else it loads
(groups, steps, the scaler) it loads as ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from recover_megatron.megatron_hooks import monkeypatch
from recover_megatron.megatron_hooks.optimizer.shard_fragments import ShardFragment, ShardFragments
from recover_megatron.megatron_hooks.optimizer.sharded_checkpoint import ShardedCheckpoint

OTHER_FORMATS = (
    "sharded_param_state_dp_zero",
    "sharded_param_state_fully_reshardable",
    "sharded_param_state_fs_model_space",
)
"""Methods by which a distributed optimizer asks for a checkpoint of another format."""


@contextmanager
def loading_into(
    optimizer: Any, fragments: ShardFragments, saved: ShardedCheckpoint, held: dict[int, list[ShardFragment]]
) -> Iterator[None]:
    """Have ``optimizer`` load a checkpoint into the pieces of ``held``, which it then updates.

    Their state is made here, and of no use before the checkpoint is loaded.  Raises ValueError for a checkpoint of
    another format.
    """
    every = [fragment for its in held.values() for fragment in its]
    if any(fragment.aside for fragment in every):
        raise ValueError("the state of shadows on the host cannot be loaded in place (--recover-shadow-device cpu)")
    fragments.install(held)
    optimizer._init_optimizer_states_with_dummy_values()  # an update by zeros: all is read from the checkpoint
    inner = fragments.inner

    def wanted(model_sharded_state_dict: Any, is_loading: bool = False, metadata: Any = None) -> Any:
        for fragment in every:  # not before: Megatron has loaded the groups, and torch has made new dicts of the state
            fragment.state = inner.state[fragment.tensor]
        return saved.wanted(every)

    def loaded(state: Any) -> None:
        for fragment, entry in zip(every, saved.found(state, every), strict=True):
            fragment.state = dict(inner.state[fragment.tensor])
            _copy(fragment, entry)
        fragments.install(held)

    with ExitStack() as replaced:
        for name in OTHER_FORMATS:
            if hasattr(optimizer, name):
                replaced.enter_context(monkeypatch.replaced(optimizer, name, _refuse))
        replaced.enter_context(monkeypatch.replaced(optimizer, "sharded_param_state_dp_reshardable", wanted))
        replaced.enter_context(monkeypatch.replaced(optimizer, "load_parameter_state_from_dp_reshardable", loaded))
        yield


def _copy(fragment: ShardFragment, entry: dict[str, Any]) -> None:
    with torch.no_grad():
        for name, value in entry.items():
            if name == "param":
                fragment.tensor.copy_(value)
            elif isinstance(value, torch.Tensor) and value.dim():
                fragment.state[name].copy_(value)
    if isinstance(step := fragment.state.get("step"), torch.Tensor):
        fragment.state["step"] = step.clone()  # Megatron gives all parameters one and the same


def _refuse(*args: Any, **kwargs: Any) -> Sequence[Any]:
    raise ValueError("a distributed optimizer is loaded in place from Megatron's default format only, by bucket")
