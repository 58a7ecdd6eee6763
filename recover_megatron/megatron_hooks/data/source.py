"""Microbatches by id, out of Megatron's own datasets, with the loader's worker processes reading ahead.

    Source.begin(consumed, ids, total)   an iteration starts: these ids of it are mine, and (until told otherwise) of
                                         those after it: the loader reads them ahead, in order
    Source.get(j)                        microbatch j of this iteration; one that is not mine is read on the spot

A loader's process that dies is told to whoever reads next: torch raises it in whatever the main thread is doing, a
checkpoint or a sum.

Which samples microbatch j of an iteration has says `microbatches`: those that stock Megatron deals.  Samples carry
their number with them (``TaggedDataset``), so what ``get`` returns is checked, not believed.
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
"""The field that carries a sample's number through the loader; no dataset of Megatron uses this name."""

Batch = dict[str, Any]

_OF_THE_WORK = (signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)
"""Signals by which a sample may end whoever reads it."""


END_SECONDS = 1.0
"""How long a process whose pipe has closed may take to end."""


class LoaderKilled(Exception):
    """A process that reads for this worker was killed by a signal from outside: a matter of this worker's host."""


class TaggedDataset(torch.utils.data.Dataset):
    """A dataset whose samples say which they are; everything else is the dataset's own."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Batch:
        return {**self._dataset[index], SAMPLE: int(index)}

    def __getattr__(self, name: str) -> Any:
        # Unpickling (a loader's spawned process) asks before __init__ has run.
        if name == "_dataset":
            raise AttributeError(name)
        return getattr(self._dataset, name)


_sources: weakref.WeakSet[Source] = weakref.WeakSet()


class Source:
    """Microbatches by number.  ``loader``: as Megatron built it over a ``TaggedDataset``; its settings are kept."""

    def __init__(self, loader: torch.utils.data.DataLoader, size: int, consumed: int, order: Order | Kept) -> None:
        self.size = size
        """Samples of a microbatch."""
        self._order = order
        self._dataset = loader.dataset
        self._collate = loader.collate_fn
        self._plan: tuple[tuple[int, ...], int] | None = None
        self._consumed = self.position = consumed
        self._cursor = 0  # of the reading ahead: index into the ids of the iteration at self._ahead
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
        """An iteration of ``total`` microbatches starts at ``consumed`` samples, ``ids`` of it are mine."""
        expected = self._consumed + (0 if self._plan is None else self._plan[1] * self.size)
        if self._plan != (tuple(ids), total) or consumed != expected:
            self._ahead, self._cursor = consumed, 0
        self._plan = tuple(ids), total
        self._consumed = consumed
        for old in [first for first in self._here if first < consumed]:
            del self._here[old]

    def get(self, j: int) -> Batch:
        """Microbatch ``j`` of this iteration.  Raises IndexError beyond the end of the dataset."""
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
            raise Disagreement(f"microbatch {j} should be samples {samples}, the loader gave {read}")
        return batch

    def _coming(self, first: int) -> bool:
        """Whether the reading ahead would ask for this microbatch in this iteration."""
        assert self._plan is not None
        ids = self._plan[0]
        return self._ahead == self._consumed and first in (self._consumed + j * self.size for j in ids[self._cursor :])

    def _next(self) -> list[int] | None:
        """The samples that the loader should read next; None: the dataset is at its end."""
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
        """End the processes that read ahead: nothing is read any more."""
        self._batches = None
        del self._loader  # which refers to them, too

    # ---- Megatron wraps a loader in an iterator, and never asks it for anything but its length

    def __len__(self) -> int:
        """Microbatches; with --full-validation of the rank that has most, so that all of them say the same."""
        return self._order.rounds if isinstance(self._order, InTurn) else len(self._dataset) // self.size

    def __iter__(self) -> Source:
        return self

    def __next__(self) -> Batch:
        raise Disagreement("a batch was asked for past the hooks: which microbatch it is cannot be known")


_read_by: Sequence[Any] = ()
"""The loader's processes that the main thread is waiting for."""


@contextmanager
def _reading(processes: Sequence[Any]) -> Iterator[None]:
    """While one of ``processes`` is waited for.  Raises ``LoaderKilled``, or RuntimeError where the work ended one."""
    global _read_by
    if processes:
        tell_readers(lambda _: _check(_read_by))
    try:
        _read_by = processes
        _check(processes)
        yield
    except (RuntimeError, EOFError, OSError) as error:  # torch does not always say by what
        if not isinstance(error, RuntimeError):  # a pipe may close a moment earlier, and its exit code come later still
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
            who = f"process {process.pid}, which reads data for this worker,"
            if code > 0:
                raise RuntimeError(f"{who} ended with exit code {code}")
            error = RuntimeError if -code in _OF_THE_WORK else LoaderKilled
            raise error(f"{who} was killed by signal {-code}")


class _Feed:
    """The batch sampler: asked in the training process whenever the loader has room to read ahead."""

    def __init__(self, ask: Callable[[], list[int] | None]) -> None:
        self._ask = ask

    def __iter__(self) -> Iterator[list[int]]:
        while (samples := self._ask()) is not None:
            yield samples


class Microbatches:
    """The microbatches of one pass over the ids ``ids``, as a schedule's data iterator.

    ``fetching()``: what each is fetched in.
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
    """Begin a process that reads ahead; ``also``: what the loader's own settings want done there."""
    share_by_lasting_socket()
    if also is not None:
        also(number)


def _source_of(iterator: Any) -> Source | None:
    inner = getattr(iterator, "iterable", iterator)
    return inner if isinstance(inner, Source) else None


def sources_of(iterators: Any) -> Sequence[Source]:
    """The sources behind what Megatron hands to a schedule, one iterator or one for each chunk; none without data."""
    several = iterators if isinstance(iterators, list) else [iterators]
    return [source for source in map(_source_of, several) if source is not None]


def of_ids(iterators: Any, ids: Sequence[int], fetching: Callable[[], AbstractContextManager[None]]) -> Any:
    """What a schedule gets in place of ``iterators``, one or one for each chunk: see ``Microbatches``."""

    def one(iterator: Any) -> Microbatches | None:
        source = _source_of(iterator)
        return None if source is None else Microbatches(source, ids, fetching)

    return list(map(one, iterators)) if isinstance(iterators, list) else one(iterators)


def finish() -> None:
    """The training is over: end the loaders' processes.

    At the interpreter's end they would be waited for, or killed, which torch tells as an error.
    """
    for source in list(_sources):
        source.close()


def install(loop: Loop) -> None:
    """Wrap the seams: where the loop builds its loaders, and where a data set draws random numbers."""
    loop.wrap("loader", _with_sources)
    loop.wrap("endless", _endless)
    resumed.install()
    monkeypatch.wrap("GPTFIMDataset._query_document_sample_shuffle_indices", _by_index)


def _by_index(read: Callable[..., Any]) -> Callable[..., Any]:
    """--fim-data: draw by the number of the sample, not from a generator that goes on from sample to sample."""

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
    """The microbatches of a loader of the user's own, each under its number in the run."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getitem__(self, number: int) -> Batch:
        return {**self._loader.microbatch(number), SAMPLE: torch.tensor([number])}


class Kept:
    """The samples of --dataloader-type cyclic, in the order for the data-parallel ranks of the run's first launch.

    Their number is an argument of Megatron's (`resumed.SHUFFLED_FOR`), which a worker that comes later gets with the
    state, after it has built its loaders.
    """

    def __init__(self, total: int, size: int, *, sharded: bool) -> None:
        self._size, self._sharded = size, sharded
        self._of = lru_cache(maxsize=4)(partial(Shuffled, total, sharded=sharded))

    def _order(self, size: int) -> Shuffled:
        return self._of(size, getattr(get_args(), resumed.SHUFFLED_FOR))

    def samples(self, first: int) -> list[int]:
        """Numbers of the samples of the microbatch that begins at ``first``."""
        return self._order(self._size).samples(first)

    def is_between(self, consumed: int) -> bool:
        """True where no microbatch begins after ``consumed`` samples; not known what wrote them: no round."""
        order = self._order(self._size)
        return bool(consumed % self._size if resumed.knows() else consumed % order.epoch % order.round)

    def is_in_epoch(self, consumed: int) -> bool:
        """True where ``consumed`` samples are no whole epochs."""
        return bool(consumed % self._order(self._size).epoch)

    def is_of_others(self, consumed: int, size: int) -> bool:
        """True where microbatches of ``size`` have read, in ``consumed`` samples, others than ours would have."""
        ours, theirs = both = self._order(self._size), self._order(size)
        if ours is theirs or not any(consumed % its.epoch for its in both):
            return False
        # Where all ranks shuffle the whole, the microbatch says how much of the data set that is.
        return not self._sharded or ours.epoch != theirs.epoch or any(consumed % its.epoch % its.round for its in both)


def _only(batches: list[Batch]) -> Batch:
    return batches[0]


def _external(loader: Any, consumed: int) -> Source:
    """What a loader of the user's own gives (--dataloader-type external), by its numbers.

    Raises UserError for one that gives batches one after the other alone.
    """
    args = get_args()
    flag = "--recover with --dataloader-type external"
    if not callable(getattr(loader, "microbatch", None)):
        raise UserError(
            f"{flag} needs a loader with a method microbatch(number): {type(loader).__name__} gives batches one after "
            "the other, and a lost one must be read again by its number in the run"
        )
    size = args.micro_batch_size
    if getattr(args, "full_validation", False) or (getattr(args, "eval_micro_batch_size", None) or size) != size:
        raise UserError(f"{flag} cannot be combined with --full-validation or another --eval-micro-batch-size")
    if consumed % size:
        raise UserError(
            f"{flag}: {consumed} samples have been consumed, and no microbatch of {size} begins after them: give the "
            "--micro-batch-size of the run that wrote the checkpoint"
        )
    made = torch.utils.data.DataLoader(
        _Numbered(loader),
        batch_size=1,
        collate_fn=_only,
        num_workers=args.num_workers,
        persistent_workers=args.num_workers > 0,
    )
    return Source(made, size, consumed, ByNumber(size))


def _order_of(dataset: Any, sampler: Any, consumed: int) -> Order | Kept:
    args, size, kind = get_args(), sampler.micro_batch_size, type(sampler).__name__
    if kind == "MegatronFullValidationSampler":
        return InTurn(len(dataset), args.data_parallel_size)
    if kind != "MegatronPretrainingRandomSampler":
        return InOrder(len(dataset), size)
    if type(dataset).__name__ == "RandomSeedDataset":
        raise UserError(
            "--recover cannot be combined with Megatron's RandomSeedDataset: what it draws for a sample depends on "
            "the epoch that its loader is in, and here a loader reads ahead into the next one"
        )
    if not getattr(args, resumed.SHUFFLED_FOR, 0):
        setattr(args, resumed.SHUFFLED_FOR, args.data_parallel_size)
    order = Kept(len(dataset), size, sharded=sampler.data_sharding)
    if (theirs := resumed.sharded_before(sampler.data_sharding)) != sampler.data_sharding and order.is_in_epoch(
        consumed
    ):
        raise UserError(
            f"--dataloader-type cyclic: {consumed} samples have been consumed, in the middle of an epoch, by a run "
            + ("without --no-data-sharding: leave it out" if theirs else "with --no-data-sharding: give it here, too")
            + ", or samples of this epoch are read again"
        )
    if order.is_between(consumed) or order.is_of_others(consumed, resumed.micro_batch_before(size)):
        raise UserError(
            f"--dataloader-type cyclic: {consumed} samples have been consumed, and with --micro-batch-size {size} the "
            "next ones would not be those that follow: give the --micro-batch-size of the run that wrote the checkpoint"
            + ("" if resumed.knows() else ", and start as many data-parallel ranks")
        )
    return order


def _endless(original: Callable[..., Any]) -> Callable[..., Any]:
    def cyclic_iter(iterable: Any) -> Any:
        return iterable if isinstance(iterable, Source) else original(iterable)

    return cyclic_iter
