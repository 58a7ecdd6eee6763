"""Microbatches identified by their number: samples, random numbers, and the check that each is counted once.

Microbatch j of an iteration begins at sample first = consumed + j * size, where ``consumed`` is the number of samples
that the run has consumed before this iteration.  Its samples are:

    InOrder    --dataloader-type single: the samples first, first + 1, ...
    Shuffled   --dataloader-type cyclic: the samples that Megatron's shuffling sampler gives data-parallel rank
               (first / size) % ranks, epoch after epoch
    ByNumber   --dataloader-type external: the samples that the user's loader returns for the number first / size
    InTurn     --full-validation: one sample for each rank in turn; after its last sample a rank begins again

The samples of skipped iterations (--iterations-to-skip) count as consumed, but are not read.  The version of the state
after a step includes the skipped iterations that directly follow, because they do not change the state.  So a joining
worker begins after them.  steps.jsonl has no line for skipped iterations; the next line shows their number.

Random numbers are a function of (seed, iteration, microbatch, position), never of the worker that runs the microbatch
(``MicrobatchSeeds``).  Gradients are counted when they are added to the buffer (``Accumulated``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.pipeline_parallel.utils import get_comm_stream
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.transformer.moe.moe_utils import RandomSTEShared
from megatron.core.utils import get_model_config
from megatron.training import get_args

from recover_megatron.instep.faults import WrongGradients
from recover_megatron.integrate import Loop
from recover_megatron.megatron_hooks import monkeypatch
from recover_megatron.workload.assign import group_size


class Accumulated:
    """Counts, for each dense parameter, the microbatches whose gradients were added to the buffer.

    The largest count of a model chunk is its number of microbatches, because at least one parameter gets a gradient
    from every microbatch.  Others may get none, such as a vision transformer's from a sample without an image.  Several
    gradients of a parameter in one call of Megatron's backward pass count once, because modules with separate backward
    passes may share the parameter (--overlap-moe-expert-parallel-comm), or its layer may be used twice and recomputed.
    """

    def __init__(self) -> None:
        self._counts: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()
        """Model chunk -> microbatches counted for each dense parameter since the chunk was built."""
        self._call = 0
        """Number of calls of Megatron's backward pass, including the current call."""

    def install(self) -> None:
        """Wrap Megatron's functions that make gradient hooks and run backward passes, before the model is built."""
        monkeypatch.wrap("DistributedDataParallel._make_backward_post_hook", self._counting)
        monkeypatch.wrap("backward_step", self._calling)
        monkeypatch.wrap("TransformerModelChunkSchedulePlan.run", self._calling)

    def _calling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(*args: Any, **kwargs: Any) -> Any:
            self._call += 1
            return original(*args, **kwargs)

        return backward

    def _counting(self, make: Callable[..., Any]) -> Callable[..., Any]:
        def _make_backward_post_hook(ddp: Any, param: torch.nn.Parameter) -> Callable[..., None]:
            return self._counted(ddp, param, make(ddp, param))

        return _make_backward_post_hook

    def watch(self, fsdp: Any, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Count the gradients of a Megatron-FSDP chunk; call this after FSDP has registered its own hooks."""
        for param in parameters:
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(self._counted(fsdp, param, lambda _: None))

    def _counted(self, chunk: Any, param: torch.nn.Parameter, add: Callable[..., None]) -> Callable[..., None]:
        """Wrap ``add``, which adds a gradient of ``param`` to the buffer, so that the microbatch is counted.

        Experts' parameters are not counted, because some microbatches give them no gradient."""
        if not getattr(param, "allreduce", True):
            return add
        counts = self._counts.setdefault(chunk, [])
        place, last = len(counts), self._call
        counts.append(0)

        def count(*gradient: Any) -> None:
            nonlocal last
            add(*gradient)
            if last != self._call:
                last = self._call
                counts[place] += 1

        return count

    def counts(self, model: Sequence[Any]) -> list[list[int]]:
        """Return, for each chunk, the counts of its trainable dense parameters; empty if the chunk has none."""
        return [list(self._counts.get(chunk, ())) for chunk in model]

    def check(self, model: Sequence[Any], before: Sequence[list[int]], microbatches: Sequence[int]) -> None:
        """Raise WrongGradients unless each chunk has added the gradients of as many microbatches as expected.

        ``before``: an earlier result of ``counts``.  ``microbatches``: for each chunk, the expected number since then;
        microbatches without a backward pass do not count (``has_gradient``).
        """
        counts = zip(before, self.counts(model), microbatches, strict=True)
        for number, (old, new, wanted) in enumerate(counts):
            added = max((now - then for now, then in zip(new, old, strict=True)), default=wanted)
            if added != wanted:
                raise WrongGradients(f"chunk {number} added the gradients of {added} microbatches instead of {wanted}")


def has_gradient(output: Any) -> bool:
    """Return whether Megatron will run a backward pass from ``output``, the output of a forward step.

    Megatron runs none (``schedules.backward_step``) if no trained parameter took part in the forward step, for example
    if only a frozen language model processed text.
    """
    first = output[0] if isinstance(output, list) else output
    return bool(getattr(first, "requires_grad", True))


def grouped(model: Any, count: int) -> AbstractContextManager[None]:
    """Return a context in which Megatron's schedule can run ``count`` microbatches through ``model`` (or its chunks).

    An interleaved pipeline runs microbatches in groups.  The context sets a group size that fits ``count``; only the
    schedules read it, when a pass begins.  With any group size the microbatches pass each chunk in the same order, so
    the gradients are equal to the bit.  Raises ValueError if ``count`` is too small for an interleaved pipeline with
    this number of stages.
    """
    if not isinstance(model, list) or len(model) < 2:
        return nullcontext()
    config = get_model_config(model[0])
    stages, usual = config.pipeline_model_parallel_size, config.microbatch_group_size_per_vp_stage
    size = group_size(count, stages, usual or stages)
    return monkeypatch.replaced(config, microbatch_group_size_per_vp_stage=size)


@contextmanager
def whole_pass(model: Sequence[Any]) -> Iterator[None]:
    """Context of a forward and backward pass over the chunks ``model``, which cleans up if an exception ends the pass.

    With --delay-wgrad-compute Transformer Engine queues the inputs of weight gradients; the cleanup empties the queues.
    With --overlap-moe-expert-parallel-comm Megatron uses a second stream; the cleanup makes the current stream wait for
    it.
    """
    try:
        yield
    except BaseException:
        for module in (module for chunk in model for module in chunk.modules()):
            # Fused operations are stored in tuples, so ``modules()`` does not yield them.
            fused = getattr(module, "_fused_ops", None) or getattr(module, "_fused_grouped_swiglu_ops", None) or ()
            for one in (module, *(inner for whole in fused for inner in whole.modules())):
                queue = getattr(getattr(one, "wgrad_store", None), "context", None)
                while queue is not None and not queue.empty():
                    queue.get()
        if (second := get_comm_stream()) is not None:
            torch.cuda.current_stream().wait_stream(second)
        raise


_MASK = (1 << 64) - 1
SAME_ON_TENSOR_RANKS = ("data-parallel-rng", "mtp-hsm-rng")


def mix(*numbers: int) -> int:
    """Hash a sequence of integers to 63 bits (the finaliser of SplitMix64, chained)."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state ^ (number & _MASK)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 30)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1


def install(loop: Loop) -> None:
    """Wrap the functions that skip a batch, save random states, or draw a router's constant bias.

    Skipped batches are not read.  Saved random states have no effect with --recover (see ``MicrobatchSeeds``).  But
    with --data-parallel-random-init a later start reads one state for each data-parallel rank of the launch, so the
    states of lost ranks are filled in.
    """
    loop.wrap("skipped_step", _unread)
    loop.wrap("random_states", _as_many_as_launched)
    monkeypatch.wrap("apply_biased_logits", _drawn_by_layer)


def _as_many_as_launched(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_rng_state(*args: Any, **kwargs: Any) -> Any:
        # Megatron's list of gathered states must have the present number of ranks, instead of the launch's.
        with monkeypatch.replaced(parallel_state, _MPU_DATA_PARALLEL_WORLD_SIZE=None):
            found = original(*args, **kwargs)
        states = getattr(found, "data", found)  # some checkpoint formats wrap the states in an object
        if isinstance(states, dict):
            (states,) = states.values()  # the only entry: this worker's position
        if get_args().data_parallel_random_init:
            states += states[-1:] * (get_args().data_parallel_size - len(states))
        return found

    return get_rng_state


def _drawn_by_layer(original: Callable[..., Any]) -> Callable[..., Any]:
    """Draw a router's constant bias (--moe-router-force-biased below 0) from the seed and the layer's number.

    Megatron draws this bias in the first forward pass of a process, so that it depends on the first microbatch.
    """

    def apply_biased_logits(logits: torch.Tensor, std: float, layer_number: int | None = None) -> Any:
        kept = RandomSTEShared._cache
        if std < 0 and layer_number is not None and layer_number not in kept:
            generator = torch.Generator()
            generator.manual_seed(mix(get_args().seed, layer_number))
            kept[layer_number] = (torch.randn(logits.shape[-1], generator=generator) * -std).to(logits)
        return original(logits, std, layer_number)

    return apply_biased_logits


class MicrobatchSeeds:
    """Sets the states of torch's and Megatron's random number generators before a forward pass.

    ``device``: the model's device.

    As in Megatron, the default generator has the same seed on all tensor-parallel ranks of a stage.  The seeds of
    Megatron's tracked generators also depend on the tensor, context and expert ranks, except the generators in
    ``SAME_ON_TENSOR_RANKS``.  Activation recomputation saves and restores the states itself.
    """

    def __init__(self, device: torch.device) -> None:
        self._scratch = torch.Generator(device=device)
        self._device = device

    def seed(self, iteration: int, microbatch: int, chunk: int) -> None:
        """Set the states for microbatch ``microbatch`` of ``iteration`` (from 1) on model chunk ``chunk``."""
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
            if isinstance(states[name], torch.Generator):  # Transformer Engine's generator: CUDA graphs refer to it
                states[name].manual_seed(seed)
                continue
            self._scratch.manual_seed(seed)
            states[name] = self._scratch.get_state()
        tracker.set_states(states)

    def _seed_default(self, base: int) -> None:
        # torch.manual_seed would record a traceback of this deep stack for each unused kind of accelerator, which took
        # longer than all other work per microbatch in this class.
        torch.default_generator.manual_seed(base)
        if self._device.type == "cuda":
            torch.cuda.manual_seed(base)


class InOrder:
    """Order of samples by their numbers.  ``total``: samples of the data set; ``size``: samples of a microbatch."""

    def __init__(self, total: int, size: int) -> None:
        self._total = total
        self._size = size

    def samples(self, first: int) -> list[int] | None:
        """Return the samples of the microbatch that begins at sample ``first``; None after the last microbatch."""
        return list(range(first, first + self._size)) if first + self._size <= self._total else None


class ByNumber:
    """Order of a user's loader, which returns microbatches by number in the run.  ``size``: samples of a microbatch."""

    def __init__(self, size: int) -> None:
        self._size = size

    def samples(self, first: int) -> list[int]:
        """Return a list whose only entry is the number of the microbatch that begins at sample ``first``."""
        return [first // self._size]


class InTurn:
    """Order in which the samples of a data set are dealt one by one to the ranks of the launch.

    A microbatch is one sample.  A rank that has used all its samples starts again with its first sample.  ``total``:
    samples of the data set; ``ranks``: data-parallel ranks of the launch.
    """

    def __init__(self, total: int, ranks: int) -> None:
        if total < ranks:
            raise ValueError(f"{total} samples are fewer than the {ranks} ranks")
        self._total = total
        self._ranks = ranks

    @property
    def rounds(self) -> int:
        """Number of microbatches per rank after which every rank has used all its samples."""
        return -(-self._total // self._ranks)

    def samples(self, first: int) -> list[int]:
        """Return the samples of the microbatch that begins at ``first``."""
        turn, rank = divmod(first, self._ranks)
        own = -(-(self._total - rank) // self._ranks)
        return [turn % own * self._ranks + rank]


class Shuffled:
    """Order of Megatron's shuffling sampler, which shuffles the samples of a data set again in each epoch.

    ``total``: samples of the data set; ``size``: samples of a microbatch; ``ranks``: data-parallel ranks of the
    launch.  In an epoch each rank has the same number of microbatches, so some samples may be left over.
    ``sharded``: True if each rank shuffles a separate part (Megatron's default); False if all ranks shuffle the
    complete data set.  In that case left-over samples of an epoch, if there are enough, replace the first microbatch of
    the first ranks in the next epoch.
    """

    def __init__(self, total: int, size: int, ranks: int, *, sharded: bool) -> None:
        self._size = size
        self._ranks = ranks
        self._sharded = sharded
        self.round = size * ranks
        """Number of samples in a round, which is one microbatch of every rank."""
        self.epoch = total // self.round * self.round
        """Number of samples that an epoch uses."""
        if not self.epoch:
            raise ValueError(f"{total} samples are not enough for one microbatch of {size} on each of {ranks} ranks")
        self._bucket = self.epoch // ranks if sharded else total // size * size
        self._shuffled = lru_cache(maxsize=2)(self._shuffle)

    def samples(self, first: int) -> list[int]:
        """Return the samples of the microbatch that begins at ``first``."""
        epoch, at = divmod(first, self.epoch)
        begins, rank = at // self.round * self.round, at % self.round // self._size
        shuffled = self._shuffled(epoch)
        if self._sharded:
            place = begins // self._ranks
            return [rank * self._bucket + sample for sample in shuffled[place : place + self._size].tolist()]
        place = begins + rank
        if not begins and epoch:
            left = self._shuffled(epoch - 1)[self.epoch + rank :: self._ranks].tolist()
            if len(left) >= self._size:
                return list(left[: self._size])
        return list(shuffled[place : begins + self.round : self._ranks].tolist())

    def _shuffle(self, epoch: int) -> torch.Tensor:
        generator = torch.Generator()
        generator.manual_seed(epoch)
        return torch.randperm(self._bucket, generator=generator)


def to_skip() -> frozenset[int]:
    """Return the numbers, from 1, of the iterations that this run skips (--iterations-to-skip)."""
    args = get_args()
    return frozenset(iteration for iteration in args.iterations_to_skip or () if iteration <= args.train_iters)


def with_skipped(iteration: int, skipped: Iterable[int]) -> int:
    """Return the last of the skipped iterations directly after ``iteration``, or ``iteration`` if none follows."""
    left_out = frozenset(skipped)
    while iteration + 1 in left_out:
        iteration += 1
    return iteration


def skipped_before(iteration: int, begun: int, skipped: Iterable[int]) -> int:
    """Return the number of skipped iterations directly before ``iteration``, but after iteration ``begun``."""
    left_out = frozenset(skipped)
    found = 0
    while iteration - found - 1 > begun and iteration - found - 1 in left_out:
        found += 1
    return found


Order = ByNumber | InOrder | InTurn | Shuffled


def _unread(original: Callable[..., Any]) -> Callable[..., Any]:
    def dummy_train_step(data_iterator: Any) -> None:
        get_rerun_state_machine().current_iteration += 1  # Megatron's messages use this number

    return dummy_train_step
