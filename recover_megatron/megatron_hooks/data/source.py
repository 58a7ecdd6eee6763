"""Microbatches by number, from Megatron's own datasets, prefetched by loader processes.

    Source.begin(consumed, ids, total)   starts an iteration in which this worker runs the microbatches ``ids``.  The
                                         loader prefetches them, and the same numbers of later iterations
    Source.get(j)                        returns microbatch j of this iteration, even if j is not in ``ids``.  A
                                         microbatch that is not prefetched is read in the main thread

If a loader process has died, the next read of a batch raises an error.  Stock torch would raise this error anywhere in
the main thread, for example in a checkpoint or a sum.

`microbatches` defines the samples of microbatch j, the same as in stock Megatron.  Each sample carries its number
(``TaggedDataset``), by which ``get`` checks the samples that it returns.
"""

from __future__ import annotations

import signal
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache, partial
from multiprocessing import connection
from typing import Any

import torch
from megatron.training import get_args

from recover_megatron.errors import Disagreement, UserError
from recover_megatron.integrate import Loop
from recover_megatron.megatron_hooks import monkeypatch
from recover_megatron.megatron_hooks.checkpoint import resumed
from recover_megatron.megatron_hooks.gradients.microbatches import ByNumber, InOrder, InTurn, Order, Shuffled
from recover_megatron.network.system import share_by_lasting_socket
from recover_megatron.out_of_turn import tell_readers

SAMPLE = "recover_sample"
"""Field of a sample with the sample's number; no dataset of Megatron uses this name."""

Batch = dict[str, Any]

_OF_THE_WORK = (signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)
"""Signals that may kill a process because of the sample that it reads."""


END_SECONDS = 1.0
"""Seconds to wait for a loader process to exit after its pipe has closed."""


class LoaderKilled(Exception):
    """A loader process of this worker was killed by a signal from outside, which counts as a fault of the host."""


class TaggedDataset(torch.utils.data.Dataset):
    """Wrapper of a dataset that adds to each sample the sample's number; other attributes are the dataset's."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Batch:
        return {**self._dataset[index], SAMPLE: int(index)}

    def __getattr__(self, name: str) -> Any:
        # Unpickling (in a loader's spawned process) reads attributes before __init__ has run.
        if name == "_dataset":
            raise AttributeError(name)
        return getattr(self._dataset, name)


_sources: weakref.WeakSet[Source] = weakref.WeakSet()


class Source:
    """Reads the microbatches of one data set by their numbers.

    ``loader``: Megatron's loader of a ``TaggedDataset``; this class reads with the same settings.  ``size``: samples of
    a microbatch.  ``consumed``: samples that the run has consumed.  ``order``: defines the samples of a microbatch.
    """

    def __init__(self, loader: torch.utils.data.DataLoader, size: int, consumed: int, order: Order | Cyclic) -> None:
        self.size = size
        """Number of samples in a microbatch."""
        self._order = order
        self._dataset = loader.dataset
        self._collate = loader.collate_fn
        self._plan: tuple[tuple[int, ...], int] | None = None
        self._consumed = self.position = consumed
        self._cursor = 0  # prefetch position: index into the ids of the iteration that begins at self._ahead
        self._ahead = consumed
        self._asked: deque[int] = deque()  # first samples of the microbatches that the loader is reading
        self._here: dict[int, Batch] = {}
        self._loader = torch.utils.data.DataLoader(
            loader.dataset,
            batch_sampler=_Feed(self._next),
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            collate_fn=loader.collate_fn,
            persistent_workers=loader.persistent_workers,
            worker_init_fn=partial(_begin, loader.worker_init_fn),
            prefetch_factor=loader.prefetch_factor,
        )
        self._batches: Iterator[Batch] | None = None
        _sources.add(self)

    def begin(self, consumed: int, ids: Sequence[int], total: int) -> None:
        """Start an iteration after ``consumed`` samples, in which this worker runs the microbatches ``ids``.

        ``total``: number of the iteration's microbatches on all replicas.
        """
        expected = self._consumed + (0 if self._plan is None else self._plan[1] * self.size)
        if self._plan != (tuple(ids), total) or consumed != expected:
            self._ahead, self._cursor = consumed, 0
        self._plan = tuple(ids), total
        self._consumed = consumed
        for old in [first for first in self._here if first < consumed]:
            del self._here[old]

    def get(self, j: int) -> Batch:
        """Return microbatch ``j`` of this iteration.  Raises IndexError beyond the end of the dataset."""
        first = self._consumed + j * self.size
        samples = self._order.samples(first)
        while first not in self._here and (first in self._asked or self._coming(first)):
            if self._batches is None:
                self._batches = iter(self._loader)
            with _reading(getattr(self._batches, "_workers", ())):
                batch = next(self._batches)
            self._here[self._asked.popleft()] = batch
        batch = self._here.pop(first, None)
        if batch is None:
            if samples is None:
                raise IndexError(f"samples {first} to {first + self.size - 1} are beyond the end of the dataset")
            batch = self._collate([self._dataset[sample] for sample in samples])
        read = batch.pop(SAMPLE).tolist()
        if read != samples:
            raise Disagreement(f"microbatch {j} must have samples {samples}, but the loader returned {read}")
        return batch

    def _coming(self, first: int) -> bool:
        """Return whether the loader will still prefetch the microbatch at sample ``first`` in this iteration."""
        assert self._plan is not None
        ids = self._plan[0]
        return self._ahead == self._consumed and first in (self._consumed + j * self.size for j in ids[self._cursor :])

    def _next(self) -> list[int] | None:
        """Return the samples of the next microbatch to prefetch; None at the end of the dataset."""
        assert self._plan is not None
        ids, total = self._plan
        while True:
            if self._cursor == len(ids):
                self._ahead, self._cursor = self._ahead + total * self.size, 0
            first = self._ahead + ids[self._cursor] * self.size
            if (samples := self._order.samples(first)) is None:
                return None
            self._cursor += 1
            if first not in self._asked and first not in self._here:
                self._asked.append(first)
                return samples

    def close(self) -> None:
        """Stop the loader processes.  No microbatch can be read afterwards."""
        self._batches = None
        del self._loader  # the loader refers to the processes, too

    # ---- Megatron uses a source in place of a loader: it calls iter() and len(), and never reads a batch

    def __len__(self) -> int:
        """Return the number of microbatches of the data set.

        With --full-validation it is the largest number of any rank, so that all ranks agree.
        """
        return self._order.rounds if isinstance(self._order, InTurn) else len(self._dataset) // self.size

    def __iter__(self) -> Source:
        return self

    def __next__(self) -> Batch:
        raise Disagreement("a batch was read without the hooks of --recover, so its microbatch number is unknown")


_read_by: Sequence[Any] = ()
"""The loader processes for which the main thread is waiting; empty outside a read."""


@contextmanager
def _reading(processes: Sequence[Any]) -> Iterator[None]:
    """Context in which the main thread waits for a batch from ``processes``.

    If a process has died, raises ``LoaderKilled`` (killed from outside) or RuntimeError (failed on a sample).
    """
    global _read_by
    if processes:
        tell_readers(lambda _: _check(_read_by))
    try:
        _read_by = processes
        _check(processes)
        yield
    except (RuntimeError, EOFError, OSError) as error:  # torch's error may lack the exit code
        if not isinstance(error, RuntimeError):  # the pipe closes before the exit code is known
            ended = connection.wait([process.sentinel for process in processes], END_SECONDS)
            for process in (process for process in processes if process.sentinel in ended):
                process.join()
        _check(processes)
        raise
    finally:
        _read_by = ()


def _check(processes: Sequence[Any]) -> None:
    for process in processes:
        if code := process.exitcode:
            name = f"data loader process {process.pid} of this worker"
            if code > 0:
                raise RuntimeError(f"{name} ended with exit code {code}")
            error = RuntimeError if -code in _OF_THE_WORK else LoaderKilled
            raise error(f"{name} was killed by signal {-code}")


class _Feed:
    """Batch sampler that calls ``ask`` for each batch, in the training process, when the loader can prefetch."""

    def __init__(self, ask: Callable[[], list[int] | None]) -> None:
        self._ask = ask

    def __iter__(self) -> Iterator[list[int]]:
        while (samples := self._ask()) is not None:
            yield samples


class Microbatches:
    """Data iterator for one run of a Megatron schedule, over the microbatches with the numbers ``ids``.

    ``fetching``: function that returns the context in which each microbatch is read.
    """

    def __init__(
        self, source: Source, ids: Sequence[int], fetching: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._source = source
        self._ids = iter(ids)
        self._fetching = fetching

    def __iter__(self) -> Microbatches:
        return self

    def __next__(self) -> Batch:
        with self._fetching():
            return self._source.get(next(self._ids))


def _begin(also: Callable[[int], None] | None, number: int) -> None:
    """Initialize a loader process; ``also``: the ``worker_init_fn`` of Megatron's loader."""
    share_by_lasting_socket()
    if also is not None:
        also(number)


def _source_of(iterator: Any) -> Source | None:
    inner = getattr(iterator, "iterable", iterator)
    return inner if isinstance(inner, Source) else None


def sources_of(iterators: Any) -> Sequence[Source]:
    """Return the sources inside ``iterators``, Megatron's iterator or a list with one iterator per model chunk."""
    several = iterators if isinstance(iterators, list) else [iterators]
    return [source for source in map(_source_of, several) if source is not None]


def of_ids(iterators: Any, ids: Sequence[int], fetching: Callable[[], AbstractContextManager[None]]) -> Any:
    """Return data iterators over the microbatches ``ids`` for a schedule, in the form of ``iterators``.

    ``iterators``: Megatron's iterator, or a list with one per model chunk.
    """

    def one(iterator: Any) -> Microbatches | None:
        source = _source_of(iterator)
        return None if source is None else Microbatches(source, ids, fetching)

    return list(map(one, iterators)) if isinstance(iterators, list) else one(iterators)


def finish() -> None:
    """Stop the loader processes after the training.

    Otherwise the interpreter would wait for them at its exit, or kill them, which torch reports as an error.
    """
    for source in list(_sources):
        source.close()


def install(loop: Loop) -> None:
    """Wrap the functions that build loaders, check a checkpoint's arguments, and draw a data set's random numbers."""
    loop.wrap("loader", _with_sources)
    loop.wrap("endless", _endless)
    resumed.install()
    monkeypatch.wrap("GPTFIMDataset._query_document_sample_shuffle_indices", _by_index)


def _by_index(read: Callable[..., Any]) -> Callable[..., Any]:
    """Seed the random numbers of --fim-data by the sample's number, so that they do not depend on earlier samples."""

    def _query_document_sample_shuffle_indices(self: Any, idx: int) -> Any:
        self.np_rng.seed([self.config.random_seed % 2**32, int(idx)])
        return read(self, idx)

    return _query_document_sample_shuffle_indices


def _with_sources(build: Callable[..., Any]) -> Callable[..., Any]:
    def build_pretraining_data_loader(dataset: Any, consumed_samples: int, *args: Any, **kwargs: Any) -> Any:
        if dataset is None:
            return build(dataset, consumed_samples, *args, **kwargs)
        if get_args().dataloader_type == "external":
            return _external(dataset, consumed_samples)
        resumed.look(dataset)
        loader = build(TaggedDataset(dataset), consumed_samples, *args, **kwargs)
        order = _order_of(dataset, loader.batch_sampler, consumed_samples)
        return Source(loader, loader.batch_sampler.micro_batch_size, consumed_samples, order)

    return build_pretraining_data_loader


class _Numbered(torch.utils.data.Dataset):
    """Dataset whose items are the microbatches of a user's loader, indexed by their number in the run."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getitem__(self, number: int) -> Batch:
        return {**self._loader.microbatch(number), SAMPLE: torch.tensor([number])}


class Cyclic:
    """Order of samples with --dataloader-type cyclic, for the number of data-parallel ranks of the run's first launch.

    The number of these ranks is read from Megatron's arguments (`resumed.SHUFFLED_FOR`) at each use, because a worker
    that joins later receives the number with the state, after it has built its loaders.  ``total``: samples of the data
    set.  ``size``: samples of a microbatch.  ``sharded``: see ``Shuffled``.
    """

    def __init__(self, total: int, size: int, *, sharded: bool) -> None:
        self._size, self._sharded = size, sharded
        self._of = lru_cache(maxsize=4)(partial(Shuffled, total, sharded=sharded))

    def _order(self, size: int) -> Shuffled:
        return self._of(size, getattr(get_args(), resumed.SHUFFLED_FOR))

    def samples(self, first: int) -> list[int]:
        """Return the numbers of the samples of the microbatch that begins at sample ``first``."""
        return self._order(self._size).samples(first)

    def is_between(self, consumed: int) -> bool:
        """Return whether the first ``consumed`` samples end inside a microbatch.

        If the checkpoint's micro batch size is unknown, return whether they end inside a round (one microbatch of every
        rank).
        """
        order = self._order(self._size)
        return bool(consumed % self._size if resumed.knows() else consumed % order.epoch % order.round)

    def is_in_epoch(self, consumed: int) -> bool:
        """Return whether the first ``consumed`` samples of the run end inside an epoch."""
        return bool(consumed % self._order(self._size).epoch)

    def is_of_others(self, consumed: int, size: int) -> bool:
        """Return whether the first ``consumed`` samples would differ if a microbatch had ``size`` samples."""
        ours, theirs = both = self._order(self._size), self._order(size)
        if ours is theirs or not any(consumed % order.epoch for order in both):
            return False
        # If all ranks shuffle the complete data set, the samples that an epoch uses depend on the size of a microbatch.
        return not self._sharded or ours.epoch != theirs.epoch or any(consumed % o.epoch % o.round for o in both)


def _only(batches: list[Batch]) -> Batch:
    return batches[0]


def _external(loader: Any, consumed: int) -> Source:
    """Return a source that reads microbatches from a user's loader (--dataloader-type external).

    Raises UserError if the loader cannot return a microbatch by its number.
    """
    args = get_args()
    flag = "--recover with --dataloader-type external"
    if not callable(getattr(loader, "microbatch", None)):
        raise UserError(
            f"{flag} needs a loader with a method microbatch(number): {type(loader).__name__} has none, but after a "
            "death lost microbatches must be read again by their numbers in the run"
        )
    size = args.micro_batch_size
    if getattr(args, "full_validation", False) or (getattr(args, "eval_micro_batch_size", None) or size) != size:
        raise UserError(f"{flag} needs --eval-micro-batch-size equal to --micro-batch-size, and no --full-validation")
    if consumed % size:
        raise UserError(
            f"{flag}: {consumed} consumed samples are not a multiple of the micro batch size {size}: use the "
            "--micro-batch-size of the run that wrote the checkpoint"
        )
    numbered = torch.utils.data.DataLoader(
        _Numbered(loader),
        batch_size=1,
        collate_fn=_only,
        num_workers=args.num_workers,
        persistent_workers=args.num_workers > 0,
    )
    return Source(numbered, size, consumed, ByNumber(size))


def _order_of(dataset: Any, sampler: Any, consumed: int) -> Order | Cyclic:
    args, size, kind = get_args(), sampler.micro_batch_size, type(sampler).__name__
    if kind == "MegatronFullValidationSampler":
        return InTurn(len(dataset), args.data_parallel_size)
    if kind != "MegatronPretrainingRandomSampler":
        return InOrder(len(dataset), size)
    if type(dataset).__name__ == "RandomSeedDataset":
        raise UserError(
            "--recover cannot be combined with Megatron's RandomSeedDataset: its random numbers for a sample depend on "
            "the loader's epoch, but with --recover the loader already prefetches samples of the next epoch"
        )
    if not getattr(args, resumed.SHUFFLED_FOR, 0):
        setattr(args, resumed.SHUFFLED_FOR, args.data_parallel_size)
    order = Cyclic(len(dataset), size, sharded=sampler.data_sharding)
    if (theirs := resumed.sharded_before(sampler.data_sharding)) != sampler.data_sharding and order.is_in_epoch(
        consumed
    ):
        raise UserError(
            f"--dataloader-type cyclic: the checkpoint was written in the middle of an epoch ({consumed} samples), "
            "by a run "
            + ("without --no-data-sharding: remove the flag" if theirs else "with --no-data-sharding: add the flag")
            + ", otherwise samples of this epoch would be read again"
        )
    if order.is_between(consumed) or order.is_of_others(consumed, resumed.micro_batch_before(size)):
        raise UserError(
            f"--dataloader-type cyclic: after {consumed} samples, --micro-batch-size {size} would skip or repeat "
            "samples: use the --micro-batch-size of the run that wrote the checkpoint"
            + ("" if resumed.knows() else ", and as many data-parallel ranks")
        )
    return order


def _endless(original: Callable[..., Any]) -> Callable[..., Any]:
    def cyclic_iter(iterable: Any) -> Any:
        return iterable if isinstance(iterable, Source) else original(iterable)

    return cyclic_iter
