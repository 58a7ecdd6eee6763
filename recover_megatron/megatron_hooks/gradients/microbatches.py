"""Each microbatch on its own, by its number: its samples, its random numbers, and that it is counted once.

Microbatch j of the iteration that starts at ``consumed`` samples begins at consumed + j * size, and its samples are:

    InOrder    --dataloader-type single: the samples from there on
    Shuffled   --dataloader-type cyclic: those that Megatron's shuffling sampler gives the data-parallel rank j % ranks,
               epoch after epoch
    ByNumber   --dataloader-type external: what the user's loader gives for (consumed + j * size) / size
    InTurn     --full-validation: one sample for each rank in turn, each rank's again and again

The samples of iterations that are left out (--iterations-to-skip) count as consumed, and nobody reads them.  A state's
version counts such iterations with the one before them, of which they change nothing: a worker that begins anew begins
after them.  steps.jsonl has no line of them, and the line that follows says how many they are.

Random numbers are a function of (seed, iteration, microbatch, position), never of who runs the microbatch
(``MicrobatchSeeds``); the gradients are counted where they are added to the buffer (``Accumulated``).
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
    """How many microbatches entered the gradient of each model chunk, since the start of the run.

    Counted where it happens: by the hooks that add gradients to the buffer.  Some dense parameter gets gradients from
    every microbatch, though not each does: a vision transformer's may have none from a sample without an image.  And
    one may get several from a microbatch, in one call of Megatron's backward pass: what parts of the model share that
    have a backward pass of their own (--overlap-moe-expert-parallel-comm), a layer that is used twice and computed
    again.  They count once.
    """

    def __init__(self) -> None:
        self._counts: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()
        """Of each chunk, by dense parameter."""
        self._call = 0
        """The number of the call under way."""

    def install(self) -> None:
        """Wrap the seams; must come before the model is built."""
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
        """Count for a chunk in Megatron-FSDP, whose own hooks of ``parameters`` have been registered before."""
        for param in parameters:
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(self._counted(fsdp, param, lambda _: None))

    def _counted(self, chunk: Any, param: torch.nn.Parameter, add: Callable[..., None]) -> Callable[..., None]:
        """``add``, which adds a gradient of ``param``: a dense one's are counted, of an expert some microbatch may have
        none."""
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
        """By chunk, by parameter; of one without a trainable dense parameter nothing can be counted."""
        return [list(self._counts.get(chunk, ())) for chunk in model]

    def check(self, model: Sequence[Any], before: Sequence[list[int]], microbatches: Sequence[int]) -> None:
        """Raise WrongGradients unless each chunk has added as many ``microbatches`` as it should since ``before``.

        Both are by chunk; microbatches of which Megatron runs no backward pass do not count (``has_gradient``).
        """
        counts = zip(before, self.counts(model), microbatches, strict=True)
        for number, (old, new, its) in enumerate(counts):
            added = max((now - then for now, then in zip(new, old, strict=True)), default=its)
            if added != its:
                raise WrongGradients(f"chunk {number} added the gradients of {added} microbatches, not of its {its}")


def has_gradient(output: Any) -> bool:
    """Whether Megatron runs a backward pass from this output of a forward step (``schedules.backward_step``).

    It does not where nothing that is trained took part: a sample of text alone, in a model whose language model is
    frozen.
    """
    first = output[0] if isinstance(output, list) else output
    return bool(getattr(first, "requires_grad", True))


def grouped(model: Any, count: int) -> AbstractContextManager[None]:
    """Let Megatron's schedule run ``count`` microbatches through ``model`` (chunks, or one model) while it is entered.

    The groups of an interleaved pipeline get a size that allows it: the schedules alone read it, when a pass begins.
    Microbatches go through a chunk of layers in the same order whatever the size, so the gradients are the same to the
    last bit.  Raises ValueError for fewer than an interleaved pipeline of so many stages can run.
    """
    if not isinstance(model, list) or len(model) < 2:
        return nullcontext()
    config = get_model_config(model[0])
    stages, usual = config.pipeline_model_parallel_size, config.microbatch_group_size_per_vp_stage
    size = group_size(count, stages, usual or stages)
    return monkeypatch.replaced(config, microbatch_group_size_per_vp_stage=size)


@contextmanager
def whole_pass(model: Sequence[Any]) -> Iterator[None]:
    """A pass over these chunks runs meanwhile; where an exception ends it, what it has begun is dropped.

    With --delay-wgrad-compute Transformer Engine keeps what the gradient of a weight is computed from in a queue, and
    takes the oldest.  With --overlap-moe-expert-parallel-comm there is a second stream: whoever waits for this one
    afterwards waits for both.
    """
    try:
        yield
    except BaseException:
        for module in (module for chunk in model for module in chunk.modules()):
            # Fused operations are kept in tuples, so that they are no modules of the model.
            fused = getattr(module, "_fused_ops", None) or getattr(module, "_fused_grouped_swiglu_ops", None) or ()
            for its in (module, *(inner for whole in fused for inner in whole.modules())):
                queue = getattr(getattr(its, "wgrad_store", None), "context", None)
                while queue is not None and not queue.empty():
                    queue.get()
        if (beside := get_comm_stream()) is not None:
            torch.cuda.current_stream().wait_stream(beside)
        raise


_MASK = (1 << 64) - 1
SAME_ON_TENSOR_RANKS = ("data-parallel-rng", "mtp-hsm-rng")


def mix(*numbers: int) -> int:
    """63 well-mixed bits of a sequence of integers (the finaliser of SplitMix64, chained)."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state ^ (number & _MASK)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 30)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1


def install(loop: Loop) -> None:
    """Wrap the seams where Megatron reads the batch of an iteration that it leaves out, for which nobody asks here, by
    which the states of random numbers come into a checkpoint, and where a random number is drawn once and kept.

    It does not matter which it has, see ``MicrobatchSeeds``; but with ``--data-parallel-random-init`` a start reads one
    of each replica of the launch, and those of the lost are made up.
    """
    loop.wrap("skipped_step", _unread)
    loop.wrap("random_states", _as_many_as_launched)
    monkeypatch.wrap("apply_biased_logits", _drawn_by_layer)


def _as_many_as_launched(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_rng_state(*args: Any, **kwargs: Any) -> Any:
        # Megatron's list is to have room for those that are asked, also where they are more or fewer than launched.
        with monkeypatch.replaced(parallel_state, _MPU_DATA_PARALLEL_WORLD_SIZE=None):
            found = original(*args, **kwargs)
        states = getattr(found, "data", found)  # in formats that say where they belong it is in an object
        if isinstance(states, dict):
            (states,) = states.values()  # of this position
        if get_args().data_parallel_random_init:
            states += states[-1:] * (get_args().data_parallel_size - len(states))
        return found

    return get_rng_state


def _drawn_by_layer(original: Callable[..., Any]) -> Callable[..., Any]:
    """Draw the bias that a router keeps for the run (--moe-router-force-biased below 0) by the seed and the layer.

    Megatron draws it in the first forward pass of a process: of whichever microbatch that is.
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
    """Sets the states of random numbers before a forward pass.  ``device``: that of the model's.

    The default stream is the same on all tensor-parallel ranks of a stage, as in Megatron, and so is every tracked one
    but those whose purpose it is to differ (they hold the tensor and expert ranks in their seed).  Activation
    recomputation saves and restores states by itself.
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


class InOrder:
    """The samples of a data set of ``total`` as they lie; ``size``: of a microbatch."""

    def __init__(self, total: int, size: int) -> None:
        self._total = total
        self._size = size

    def samples(self, first: int) -> list[int] | None:
        """Of the microbatch that begins at ``first``; None: the data set has no more."""
        return list(range(first, first + self._size)) if first + self._size <= self._total else None


class ByNumber:
    """Microbatches that a loader of the user's own gives by their number in the run; ``size``: in samples."""

    def __init__(self, size: int) -> None:
        self._size = size

    def samples(self, first: int) -> list[int]:
        """The number alone of the microbatch that begins at sample ``first``."""
        return [first // self._size]


class InTurn:
    """The samples of a data set of ``total``, one for each of the ``ranks`` of the launch in turn: microbatches of one.

    A rank that is through with its own begins with them again, at once.
    """

    def __init__(self, total: int, ranks: int) -> None:
        if total < ranks:
            raise ValueError(f"{total} samples are not one for each of {ranks} ranks")
        self._total = total
        self._ranks = ranks

    @property
    def rounds(self) -> int:
        """After how many microbatches all ranks are through with theirs."""
        return -(-self._total // self._ranks)

    def samples(self, first: int) -> list[int]:
        """Of the microbatch that begins at ``first``."""
        turn, rank = divmod(first, self._ranks)
        its = -(-(self._total - rank) // self._ranks)
        return [turn % its * self._ranks + rank]


class Shuffled:
    """The ``total`` samples of a data set, shuffled anew in each epoch, for the ``ranks`` of the launch.

    An epoch has as many microbatches, of ``size`` samples, for each rank, and some samples may be left over.
    ``sharded``: whether each rank shuffles a part of its own (Megatron's default).  Where all shuffle the whole,
    Megatron's sampler gives what is left over to its first ranks, if that is enough, in place of what would be theirs
    at the beginning of the next epoch.
    """

    def __init__(self, total: int, size: int, ranks: int, *, sharded: bool) -> None:
        self._size = size
        self._ranks = ranks
        self._sharded = sharded
        self.round = size * ranks
        """Samples that all ranks together have with one microbatch each."""
        self.epoch = total // self.round * self.round
        """Samples of an epoch."""
        if not self.epoch:
            raise ValueError(f"{total} samples are not enough for one microbatch of {size} on each of {ranks} ranks")
        self._bucket = self.epoch // ranks if sharded else total // size * size
        self._shuffled = lru_cache(maxsize=2)(self._shuffle)

    def samples(self, first: int) -> list[int]:
        """Of the microbatch that begins at ``first``."""
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
    """The iterations, from 1, that this run leaves out."""
    args = get_args()
    return frozenset(iteration for iteration in args.iterations_to_skip or () if iteration <= args.train_iters)


def with_skipped(iteration: int, skipped: Iterable[int]) -> int:
    """How many iterations are over once ``iteration`` of them are: with those that are left out right after them."""
    left_out = frozenset(skipped)
    while iteration + 1 in left_out:
        iteration += 1
    return iteration


def skipped_before(iteration: int, begun: int, skipped: Iterable[int]) -> int:
    """How many iterations are left out right before ``iteration``, of a run that began after iteration ``begun``."""
    left_out = frozenset(skipped)
    found = 0
    while iteration - found - 1 > begun and iteration - found - 1 in left_out:
        found += 1
    return found


Order = ByNumber | InOrder | InTurn | Shuffled


def _unread(original: Callable[..., Any]) -> Callable[..., Any]:
    def dummy_train_step(data_iterator: Any) -> None:
        get_rerun_state_machine().current_iteration += 1  # by which Megatron names an iteration in its messages

    return dummy_train_step
