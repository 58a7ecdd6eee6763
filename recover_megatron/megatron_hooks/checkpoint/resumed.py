"""The arguments in a checkpoint that is loaded, compared with those of this run; and the order of its samples.

batch         an entry of --step-batch-size-schedule that does not divide by this run's ranks is refused, in words
states        --data-parallel-random-init saves a random state for each rank: a run of more ranks reads none of them
made longer   Megatron's order of samples depends on the number of epochs that --train-iters asks for, and on whether
              the last one is short: a resume that changes either reads some samples again.  That is warned of
cyclic        the order of shuffled samples depends on the number of data-parallel ranks: it stays that of the launch
              that made the checkpoint, since otherwise samples of the same epoch would be read again
replaced      An index of samples in a cache is known by the path of its corpus.  Where other files stand there now,
              Megatron cuts its samples out of them by the old index.  That is warned of, too
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from megatron.training import get_args

from recover_megatron.errors import UserError
from recover_megatron.logger import get_logger
from recover_megatron.megatron_hooks import monkeypatch
from recover_megatron.megatron_hooks.layout import batches_to_come, misfits

log = get_logger(__name__)

SHORT = 0.80
"""Megatron shuffles a last epoch apart where less than this part of it is asked for."""

SHUFFLED_FOR = "recover_shuffled_for"
"""Name of the argument with the data-parallel ranks that the samples of --dataloader-type cyclic are shuffled for.

It is ours, in Megatron's arguments, so that checkpoints have it: a chain of launches keeps the order of the first one.
"""
_loaded: Any = None
"""The arguments in the checkpoint that this worker has loaded; None: it has loaded none."""
MOST_READ = 1 << 22
"""Entries of an index of documents: in a longer one the largest number is not looked for."""


def install() -> None:
    """Wrap what Megatron calls with the arguments of a checkpoint, which it forgets then."""
    monkeypatch.wrap("check_checkpoint_args", _compared)


def _compared(original: Callable[..., None]) -> Callable[..., None]:
    def check_checkpoint_args(checkpoint_args: Any, *other: Any, **others: Any) -> None:
        global _loaded
        _loaded, args = checkpoint_args, get_args()
        original(checkpoint_args, *other, **others)
        _keep_order(checkpoint_args, args)
        consumed = getattr(checkpoint_args, "consumed_train_samples", 0)
        # Megatron asserts it of the next batch here; train() looks at those after it.
        batches = batches_to_come(args, consumed)[:1] if getattr(args, "step_batch_size_schedule", None) else []
        if reasons := misfits(args, args.data_parallel_size, batches):
            raise UserError(*reasons)
        saved, ranks = getattr(checkpoint_args, "data_parallel_size", 0), args.data_parallel_size
        if getattr(args, "data_parallel_random_init", False) and saved < ranks and not args.no_load_rng:
            args.no_load_rng = True
            if os.environ.get("RANK", "0") == "0":
                log.info(
                    f"--data-parallel-random-init: the checkpoint has random states of {saved} data-parallel ranks, "
                    f"and this run has {ranks}: they are not loaded (as with --no-load-rng). With --recover the random "
                    "numbers of a microbatch depend on --seed and its number alone"
                )

    return check_checkpoint_args


def _keep_order(saved: Any, now: Any) -> None:
    """Have samples come as in the launch that made the checkpoint, whatever its number of data-parallel ranks was."""
    ranks = getattr(saved, SHUFFLED_FOR, None) or getattr(saved, "data_parallel_size", None)
    if getattr(now, "dataloader_type", None) == "cyclic" and ranks:
        setattr(now, SHUFFLED_FOR, ranks)
        if ranks != now.data_parallel_size and os.environ.get("RANK", "0") == "0":
            log.info(
                f"--dataloader-type cyclic: samples stay shuffled for {ranks} data-parallel ranks, as in the run "
                f"that wrote the checkpoint, not for the {now.data_parallel_size} of this launch: none is read twice"
            )


def knows() -> bool:
    """Tell whether this worker knows the arguments in the checkpoint that it began from (not with Megatron-Bridge)."""
    return _loaded is not None


def micro_batch_before(size: int) -> int:
    """Samples in a microbatch of the launch that made the checkpoint, for a loader that has ``size`` now."""
    saved = getattr(_loaded, "micro_batch_size", None)
    return int(saved) if saved and size == get_args().micro_batch_size else size


def sharded_before(now: bool) -> bool:
    """Tell if each rank shuffled a part of its own in the launch that made the checkpoint; not known: as ``now``."""
    return bool(getattr(_loaded, "data_sharding", now))


def look(dataset: Any) -> None:
    """Warn of a training data set, or of one in a blend, whose samples do not come as the user expects."""
    if os.environ.get("RANK", "0") != "0":
        return
    try:
        for line in of_blend(dataset, get_args(), _loaded):
            log.warning(line)
        for one in getattr(dataset, "datasets", [dataset]):
            if getattr(getattr(one, "index_split", None), "name", "") == "train" and hasattr(one, "_get_num_epochs"):
                for line in warnings(one, get_args(), _loaded):
                    log.warning(line)
    except Exception as error:  # noqa: BLE001  nothing that is written for people ends a run
        log.debug(f"the order of samples was not looked at: {error!r}")


def of_blend(dataset: Any, now: Any, then: Any) -> list[str]:
    """Warnings about a blend: it has as many samples as a training asks for, and cyclic ones are shuffled by that."""
    before, after = _asked(then), _asked(now)
    shuffled = hasattr(dataset, "datasets") and getattr(now, "dataloader_type", None) == "cyclic"
    if not shuffled or dataset.split.name != "train" or not before or not after or before == after:
        return []
    return [
        f"the run of the checkpoint was to read {before} samples of a blend, and this one is to read {after}, which "
        "--dataloader-type cyclic shuffles in another order: some are read again, and others never. To keep the order, "
        "give the number of that run, and --exit-interval to end earlier. A run that may be made longer needs the "
        "larger number from its first launch on"
    ]


def warnings(dataset: Any, now: Any, then: Any) -> list[str]:
    """Warnings about a ``GPTDataset``.  ``now``, ``then``: Megatron's arguments, and those of a checkpoint, if any."""
    found, path = [], dataset.dataset_path
    tokens, epochs, apart = _epochs(dataset, dataset.num_samples)
    if dataset.sample_index is not None:  # which it is with --dataloader-defer-npy-index-mmap, until it is read
        samples = (epochs * tokens - dataset.config.add_extra_token_to_sequence) // dataset.config.sequence_length
        documents = dataset.document_index[:MOST_READ]  # it may be on a slow disk, and all other workers wait
        whole = len(documents) == len(dataset.document_index)
        here = samples, epochs * len(dataset.indices), int(dataset.indices.max()) if whole else -1
        read = dataset.sample_index.shape[0] - 1, len(dataset.document_index), int(documents.max()) if whole else -1
        if here != read:
            found.append(
                f"the index of samples in the cache is not one of {path}: it has {read[0]} samples in {read[1]} "
                f"documents up to number {read[2]}, and the files {here[0]} in {here[1]} up to {here[2]}. Megatron "
                "does not notice, and cuts its samples out of these files by the index of others: remove the files "
                f"{dataset.unique_description_hash}-* in the cache (--data-cache-path), and start again"
            )
    before, after = _asked(then), _asked(now)
    if before and after and before != after and dataset.num_samples:
        old, old_apart = _epochs(dataset, -(-dataset.num_samples * before // after))[1:]
        if (old, old_apart) != (epochs, apart):
            most = _most(dataset, after, old, old_apart)
            by_samples = getattr(now, "train_samples", None)
            flag = f"--train-samples {most}" if by_samples else f"--train-iters {most // now.global_batch_size}"
            found.append(
                f"the run of the checkpoint was to read {before} samples ({old} epochs of {path}), and this one is "
                f"to read {after} ({epochs} epochs), which Megatron deals in another order from the first one on: some "
                f"are read again, and others later, or never. The old order is kept up to {flag}. To end earlier, "
                "give that number and --exit-interval. A run that may be made longer needs the larger number from its "
                "first launch on"
            )
    return found


def _asked(args: Any) -> int:
    """Number of samples that a training with these arguments asks for; 0: not known."""
    if samples := getattr(args, "train_samples", None):
        return int(samples)
    return (getattr(args, "train_iters", None) or 0) * (getattr(args, "global_batch_size", None) or 0)


def _most(dataset: Any, asked: int, epochs: int, apart: bool) -> int:
    """Number of samples that a training may ask for, at most, to have the order of ``epochs`` of this data set.

    ``asked``: samples that the training asks for now, of which the data set (of a blend) gives its ``num_samples``.
    """
    tokens = dataset._get_num_tokens_per_epoch()
    length, extra = dataset.config.sequence_length, dataset.config.add_extra_token_to_sequence
    whole = epochs - 1 if apart else epochs
    most = (whole * tokens - extra) // length
    if apart:
        most += int(SHORT * ((tokens - extra) // length)) - 1
    # A share of a blend is rounded up, twice.
    return (most if dataset.num_samples == asked else most - 2) * asked // int(dataset.num_samples)


def _epochs(dataset: Any, samples: int | None) -> tuple[int, int, bool]:
    """Tokens of an epoch, how many epochs ``samples`` are (None: one), and whether the last one is shuffled apart."""
    tokens = dataset._get_num_tokens_per_epoch()
    length, extra = dataset.config.sequence_length, dataset.config.add_extra_token_to_sequence
    epochs = 1 if samples is None else max(1, -(-(samples * length + extra) // tokens))
    if samples is None or epochs == 1:
        return tokens, epochs, False
    last = samples - ((epochs - 1) * tokens - extra) // length
    return tokens, epochs, last < int(SHORT * ((tokens - extra) // length))
