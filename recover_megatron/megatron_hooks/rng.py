"""Random numbers of a microbatch: a function of (seed, iteration, microbatch, position), never of who runs it.

Megatron draws them from streams that go on from microbatch to microbatch; with uneven quotas those would part.  Here
each forward pass starts from states of its own: the default stream is the same on all tensor-parallel ranks of a stage,
as in Megatron, and so is every tracked one but those whose purpose it is to differ (they hold the tensor and expert
ranks in their seed).  Activation recomputation saves and restores states by itself.

So it does not matter which states a checkpoint has; but with ``--data-parallel-random-init`` a start reads one of each
replica of the launch, and those of the lost are made up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.training import get_args

from recover_megatron.integrate import Loop
from recover_megatron.megatron_hooks import monkeypatch

_MASK = (1 << 64) - 1
SAME_ON_TENSOR_RANKS = ("data-parallel-rng",)


def mix(*numbers: int) -> int:
    """63 well-mixed bits of a sequence of integers (the finaliser of SplitMix64, chained)."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state ^ (number & _MASK)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 30)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1


def install(loop: Loop) -> None:
    """Wrap the seam by which the states come into a checkpoint."""
    loop.wrap("random_states", _as_many_as_launched)


def _as_many_as_launched(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_rng_state(*args: Any, **kwargs: Any) -> Any:
        # Megatron's list is to have room for those that are asked, also where they are more or fewer than launched.
        with monkeypatch.replaced(parallel_state, "_MPU_DATA_PARALLEL_WORLD_SIZE", None):
            found = original(*args, **kwargs)
        states = getattr(found, "data", found)  # in formats that say where they belong it is in an object
        if isinstance(states, dict):
            (states,) = states.values()  # of this position
        if get_args().data_parallel_random_init:
            states += states[-1:] * (get_args().data_parallel_size - len(states))
        return found

    return get_rng_state


class MicrobatchSeeds:
    """Sets the states before a forward pass.  ``device``: that of the model's random numbers."""

    def __init__(self, device: torch.device) -> None:
        self._scratch = torch.Generator(device=device)
        self._device = device

    def seed(self, iteration: int, microbatch: int, chunk: int) -> None:
        """Start microbatch ``microbatch`` of ``iteration`` (from 1) on model chunk ``chunk``."""
        args = get_args()
        stage = parallel_state.get_pipeline_model_parallel_rank()
        base = mix(args.seed, iteration, microbatch, stage, chunk)
        self._seed_default(base)
        tracker = tensor_parallel.get_cuda_rng_tracker()
        states = tracker.get_states()
        if not states:
            return
        ranks = (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_context_parallel_rank(),
            parallel_state.get_expert_model_parallel_rank(),
        )
        for number, name in enumerate(sorted(states)):
            own = (0,) if name in SAME_ON_TENSOR_RANKS else ranks
            seed = mix(base, number + 1, *own)
            if isinstance(states[name], torch.Generator):  # Transformer Engine's, for CUDA graphs: they keep it
                states[name].manual_seed(seed)
                continue
            self._scratch.manual_seed(seed)
            states[name] = self._scratch.get_state()
        tracker.set_states(states)

    def _seed_default(self, base: int) -> None:
        # Not torch.manual_seed: it takes a traceback of this deep stack for every kind of accelerator that is unused
        # (to seed it if it ever is), which took longer than all else that a microbatch costs here.
        torch.default_generator.manual_seed(base)
        if self._device.type == "cuda":
            torch.cuda.manual_seed(base)
