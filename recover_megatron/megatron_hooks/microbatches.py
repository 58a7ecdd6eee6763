"""Each microbatch on its own: its random numbers, that it is counted once, and pipelines that run any number of them.

Random numbers are a function of (seed, iteration, microbatch, position), never of who runs the microbatch
(``MicrobatchSeeds``); the gradients are counted where they are added to the buffer (``Accumulated``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel
from megatron.core.utils import get_model_config
from megatron.training import get_args

from recover_megatron.instep.faults import Disagreement
from recover_megatron.integrate import Loop
from recover_megatron.megatron_hooks import monkeypatch
from recover_megatron.workload.assign import group_size


class Accumulated:
    """How many microbatches entered the gradient of each model chunk, since the start of the run.

    Counted where it happens: by the hook that adds a gradient to the buffer.
    """

    def __init__(self) -> None:
        self._counts: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def install(self) -> None:
        """Wrap the seam; must come before the model is built."""
        monkeypatch.wrap(DistributedDataParallel, "_make_backward_post_hook", ("self", "param"), self._counting)

    def _counting(self, make: Callable[..., Any]) -> Callable[..., Any]:
        counts = self._counts

        def _make_backward_post_hook(ddp: Any, param: torch.nn.Parameter) -> Callable[..., None]:
            add_to_buffer = make(ddp, param)
            # The first dense parameter of a chunk gets a gradient from every microbatch (an expert's may get none).
            if ddp in counts or not getattr(param, "allreduce", True):
                return add_to_buffer
            counts[ddp] = 0

            def count(*unused: Any) -> None:
                add_to_buffer(*unused)
                counts[ddp] += 1

            return count

        return _make_backward_post_hook

    def watch(self, fsdp: Any, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Count for a chunk in Megatron-FSDP, whose own hooks of ``parameters`` have been registered before."""
        for param in parameters:
            if param.requires_grad and getattr(param, "allreduce", True):
                self._counts[fsdp] = 0
                param.register_post_accumulate_grad_hook(lambda _: self._add(fsdp))
                return

    def _add(self, chunk: Any) -> None:
        self._counts[chunk] += 1

    def counts(self, model: Sequence[Any]) -> list[int | None]:
        """By chunk; None for one without a trainable dense parameter, of which nothing can be counted."""
        return [self._counts.get(chunk) for chunk in model]

    def check(self, model: Sequence[Any], before: Sequence[int | None], microbatches: Sequence[int]) -> None:
        """Raise Disagreement unless exactly so many of its ``microbatches`` were added to each chunk since ``before``.

        By chunk; without those of which Megatron runs no backward pass, see ``has_gradient``.
        """
        counts = zip(before, self.counts(model), microbatches, strict=True)
        for number, (old, new, its) in enumerate(counts):
            if old is not None and new is not None and new - old != its:
                raise Disagreement(
                    f"chunk {number} added the gradients of {new - old} microbatches, not of its {its}: "
                    "stopping before this step is reported as good"
                )


def has_gradient(output: Any) -> bool:
    """Whether Megatron runs a backward pass from this output of a forward step (``schedules.backward_step``).

    It does not where nothing that is trained took part: a sample of text alone, in a model whose language model is
    frozen.
    """
    first = output[0] if isinstance(output, list) else output
    return bool(getattr(first, "requires_grad", True))


def grouped(model: Any, count: int) -> AbstractContextManager[None]:
    """Let Megatron's schedule run ``count`` microbatches through ``model`` (chunks, or one model) while it is entered.

    The groups of an interleaved pipeline get a size that allows it.  The schedules read that from the model's
    configuration when a pass begins, and nothing else does (CUDA graphs, which were captured for one size, are off with
    --recover).  Microbatches go through a chunk of layers in the same order whatever the size, so the gradients are the
    same to the last bit.  Raises ValueError for fewer than an interleaved pipeline of so many stages can run.
    """
    if not isinstance(model, list) or len(model) < 2:
        return nullcontext()
    config, name = get_model_config(model[0]), "microbatch_group_size_per_vp_stage"
    stages, usual = config.pipeline_model_parallel_size, getattr(config, name)
    return monkeypatch.replaced(config, name, group_size(count, stages, usual or stages))


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


def install_random_states(loop: Loop) -> None:
    """Wrap the seam by which the states of random numbers come into a checkpoint.

    It does not matter which it has, see ``MicrobatchSeeds``; but with ``--data-parallel-random-init`` a start reads one
    of each replica of the launch, and those of the lost are made up.
    """
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
    """Sets the states of random numbers before a forward pass.  ``device``: that of the model's.

    Megatron draws them from streams that go on from microbatch to microbatch; with uneven quotas those would part.
    Here each forward pass starts from states of its own: the default stream is the same on all tensor-parallel ranks of
    a stage, as in Megatron, and so is every tracked one but those whose purpose it is to differ (they hold the tensor
    and expert ranks in their seed).  Activation recomputation saves and restores states by itself.
    """

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
