"""Comparison of a loaded checkpoint's arguments with this run's, mainly so that the order of samples stays the same.

batch           a run is refused if its next batch in --step-batch-size-schedule cannot be divided among its ranks
random states   --data-parallel-random-init saves a random state for each rank; a run with more ranks loads none of them
made longer     Megatron's order of samples depends on the number of epochs that --train-iters needs, and on whether the
                last epoch is short.  If the resumed run differs in either, it reads some samples again, so a warning is
                logged
cyclic          the shuffled order of samples depends on the number of data-parallel ranks.  The order of the launch
                that wrote the checkpoint is kept; in another order samples of the same epoch would be read again
replaced        a cached index of samples is identified by the path of its corpus.  If the corpus was replaced, Megatron
                cuts samples out of the new files by the old index, so a warning is logged
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
"""Megatron shuffles the last epoch separately if less than this fraction of it is requested."""

SHUFFLED_FOR = "recover_shuffled_for"
"""Name of the argument with the number of data-parallel ranks for which --dataloader-type cyclic shuffles samples.

This package adds the argument to Megatron's arguments, which checkpoints contain.  So later launches keep the order of
the first launch.
"""
_loaded: Any = None
"""The arguments in the checkpoint that this worker has loaded; None if it has loaded none."""
MOST_READ = 1 << 22
"""Length up to which a document index is searched for its largest document number; a longer index is not searched."""


def install() -> None:
    """Wrap Megatron's check of a checkpoint's arguments, after which Megatron drops these arguments."""
    monkeypatch.wrap("check_checkpoint_args", _compared)


def _compared(original: Callable[..., None]) -> Callable[..., None]:
    def check_checkpoint_args(checkpoint_args: Any, *other: Any, **others: Any) -> None:
        global _loaded
        _loaded, args = checkpoint_args, get_args()
        original(checkpoint_args, *other, **others)
        _keep_order(checkpoint_args, args)
        consumed = getattr(checkpoint_args, "consumed_train_samples", 0)
        # After this check Megatron asserts that the next batch fits; train() checks the later batches.
        batches = batches_to_come(args, consumed)[:1] if getattr(args, "step_batch_size_schedule", None) else []
        if reasons := misfits(args, args.data_parallel_size, batches):
            raise UserError(*reasons)
        saved, ranks = getattr(checkpoint_args, "data_parallel_size", 0), args.data_parallel_size
        if getattr(args, "data_parallel_random_init", False) and saved < ranks and not args.no_load_rng:
            args.no_load_rng = True
            if os.environ.get("RANK", "0") == "0":
                log.info(
                    f"--data-parallel-random-init: the checkpoint has random states of {saved} data-parallel ranks, "
                    f"but this run has {ranks}, so no random state is loaded (as with --no-load-rng). With --recover "
                    "the random numbers of a microbatch depend only on --seed and on the microbatch's number"
                )

    return check_checkpoint_args


def _keep_order(saved: Any, now: Any) -> None:
    """Keep the sample order of the run that wrote the checkpoint, even if this run has more or fewer ranks."""
    ranks = getattr(saved, SHUFFLED_FOR, None) or getattr(saved, "data_parallel_size", None)
    if getattr(now, "dataloader_type", None) == "cyclic" and ranks:
        setattr(now, SHUFFLED_FOR, ranks)
        if ranks != now.data_parallel_size and os.environ.get("RANK", "0") == "0":
            log.info(
                f"--dataloader-type cyclic: samples stay shuffled for {ranks} data-parallel ranks, as in the run "
                f"that wrote the checkpoint, so none is read again; this launch has {now.data_parallel_size} ranks"
            )


def knows() -> bool:
    """Return whether this worker knows the arguments in the checkpoint that it loaded; False with Megatron-Bridge."""
    return _loaded is not None


def micro_batch_before(size: int) -> int:
    """Return the micro batch size of the run that wrote the checkpoint, for a loader that now uses ``size``."""
    saved = getattr(_loaded, "micro_batch_size", None)
    return int(saved) if saved and size == get_args().micro_batch_size else size


def sharded_before(now: bool) -> bool:
    """Return whether each rank shuffled a separate part in the run that wrote the checkpoint; ``now`` if unknown."""
    return bool(getattr(_loaded, "data_sharding", now))


def look(dataset: Any) -> None:
    """Log warnings if training samples have another order than before, or a cached index does not match its files.

    ``dataset``: a data set, or a blend, whose data sets are checked too.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    try:
        for line in of_blend(dataset, get_args(), _loaded):
            log.warning(line)
        for one in getattr(dataset, "datasets", [dataset]):
            if getattr(getattr(one, "index_split", None), "name", "") == "train" and hasattr(one, "_get_num_epochs"):
                for line in warnings(one, get_args(), _loaded):
                    log.warning(line)
    except Exception as error:  # noqa: BLE001  a failed check for a warning must not end the run
        log.debug(f"the order of samples was not checked: {error!r}")


def of_blend(dataset: Any, now: Any, then: Any) -> list[str]:
    """Return a warning if the number of samples of the training, and so the cyclic shuffle of a blend, has changed.

    ``now``: this run's arguments; ``then``: the checkpoint's arguments, or None.
    """
    before, after = _asked(then), _asked(now)
    shuffled = hasattr(dataset, "datasets") and getattr(now, "dataloader_type", None) == "cyclic"
    if not shuffled or dataset.split.name != "train" or not before or not after or before == after:
        return []
    return [
        f"the run that wrote the checkpoint requested {before} samples of a blend, but this run requests {after}, so "
        "--dataloader-type cyclic shuffles them in another order: some samples are read again, and some never. To keep "
        "the order, request the old number of samples again; to end earlier, add --exit-interval. If a run may be "
        "made longer, request the larger number from the first launch on"
    ]


def warnings(dataset: Any, now: Any, then: Any) -> list[str]:
    """Return warnings about the order of samples in ``dataset``, a ``GPTDataset``.

    ``now``: this run's arguments; ``then``: the checkpoint's arguments, or None.
    """
    found, path = [], dataset.dataset_path
    tokens, epochs, apart = _epochs(dataset, dataset.num_samples)
    if dataset.sample_index is not None:  # None with --dataloader-defer-npy-index-mmap, until first used
        samples = (epochs * tokens - dataset.config.add_extra_token_to_sequence) // dataset.config.sequence_length
        documents = dataset.document_index[:MOST_READ]  # do not read all of it: the disk may be slow
        whole = len(documents) == len(dataset.document_index)
        here = samples, epochs * len(dataset.indices), int(dataset.indices.max()) if whole else -1
        read = dataset.sample_index.shape[0] - 1, len(dataset.document_index), int(documents.max()) if whole else -1
        if here != read:
            found.append(
                f"the cached index of samples does not match {path}: samples, documents and largest document number "
                f"are {read[0]}, {read[1]} and {read[2]} in the index, but {here[0]}, {here[1]} and {here[2]} in the "
                "files. Megatron does not notice this, and cuts wrong samples out of the files: remove the files "
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
                f"the run that wrote the checkpoint requested {before} samples ({old} epochs of {path}), but this run "
                f"requests {after} ({epochs} epochs), so Megatron reads all samples in another order: some samples "
                f"are read again, and some never. The old order is kept up to {flag}. To end earlier, add "
                "--exit-interval. If a run may be made longer, request the larger number from the first launch on"
            )
    return found


def _asked(args: Any) -> int:
    """Return the number of samples that a training with these arguments requests; 0 if unknown."""
    if samples := getattr(args, "train_samples", None):
        return int(samples)
    return (getattr(args, "train_iters", None) or 0) * (getattr(args, "global_batch_size", None) or 0)


def _most(dataset: Any, asked: int, epochs: int, apart: bool) -> int:
    """Return the largest number of samples that a training may request so that ``dataset`` keeps its old order.

    ``asked``: samples that the training requests now; ``dataset``, perhaps one of a blend, supplies ``num_samples`` of
    these.  ``epochs``, ``apart``: results of ``_epochs`` for the old order.
    """
    tokens = dataset._get_num_tokens_per_epoch()
    length, extra = dataset.config.sequence_length, dataset.config.add_extra_token_to_sequence
    whole = epochs - 1 if apart else epochs
    most = (whole * tokens - extra) // length
    if apart:
        most += int(SHORT * ((tokens - extra) // length)) - 1
    # Megatron rounds up twice when it computes how many samples a blend takes from a data set.
    return (most if dataset.num_samples == asked else most - 2) * asked // int(dataset.num_samples)


def _epochs(dataset: Any, samples: int | None) -> tuple[int, int, bool]:
    """Return (tokens per epoch, epochs that ``samples`` need, True if the last epoch is shuffled separately).

    If ``samples`` is None, one epoch is assumed.
    """
    tokens = dataset._get_num_tokens_per_epoch()
    length, extra = dataset.config.sequence_length, dataset.config.add_extra_token_to_sequence
    epochs = 1 if samples is None else max(1, -(-(samples * length + extra) // tokens))
    if samples is None or epochs == 1:
        return tokens, epochs, False
    last = samples - ((epochs - 1) * tokens - extra) // length
    return tokens, epochs, last < int(SHORT * ((tokens - extra) // length))
