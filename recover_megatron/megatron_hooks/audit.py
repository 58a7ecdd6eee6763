"""The audit: which microbatches entered the gradient of an iteration, recorded where it happens.

                 dataset[i]  gains a field with i                    TaggedDataset
                     |   (collate, worker processes, pinning)
                 the loader's batch: field taken out, ids noted      AuditedLoader        --> fetched
                     |
                 forward, backward
                     |
                 gradient added to the buffer (main_grad)            counting_hook        --> accumulated
                     |
                 reduction, optimizer step
                     |
    end of train_step: ids of this replica = the first `accumulated` of `fetched`; gathered over the replicas;
    the writer adds one line to steps.jsonl                          Audit.iteration_done

A microbatch id is j = (sample - consumed samples at the start of the iteration) / micro batch size (DESIGN: samples of
(t, j) are consumed + j * micro_batch_size).  Microbatches are fetched and accumulated in the same order (every schedule
of Megatron is first in, first out per chunk), so the count of accumulations says which of the fetched ids are in the
gradient.  All workers count; the ids are known where the batches are read, and those of the last pipeline stage report.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from megatron.core import mpu
from megatron.core.distributed import DistributedDataParallel
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.training import get_args, training

from recover_megatron.arguments import RecoverConfig
from recover_megatron.megatron_hooks import seams
from recover_megatron.megatron_hooks.layout import data_parallel_ranks_per_replica
from recover_megatron.report.steps import Step, StepsFile

SAMPLE = "recover_sample"
"""The field that carries a sample's number through the loader; no dataset of Megatron uses this name."""


class AuditError(RuntimeError):
    """What was accumulated is not what this worker was to run: the invariant would be broken by going on."""


class TaggedDataset(torch.utils.data.Dataset):
    """A dataset whose samples say which they are; everything else is the dataset's own."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self._dataset[index], SAMPLE: int(index)}

    def __getattr__(self, name: str) -> Any:
        # Unpickling (a loader's spawned process) asks before __init__ has run.
        if name == "_dataset":
            raise AttributeError(name)
        return getattr(self._dataset, name)


class AuditedLoader:
    """A data loader that notes the samples of each batch it gives out."""

    def __init__(self, loader: Any, fetched: list[list[int]]) -> None:
        self._loader = loader
        self._fetched = fetched

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self._loader:
            self._fetched.append(batch.pop(SAMPLE).tolist())
            yield batch


class Audit:
    """The record of one worker, and on one of them the file.

    ``install`` wraps three seams of Megatron: where the loader is built, where a gradient enters the buffer, and the
    training step.
    """

    def __init__(self, config: RecoverConfig) -> None:
        self._config = config
        self._fetched: list[list[list[int]]] = []  # per training loader of this worker: the samples of each batch
        self._accumulated: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._file: StepsFile | None = None

    def install(self) -> None:
        """Wrap the seams; raises UserError if this Megatron's are not the ones we know."""
        seams.wrap(training, "build_pretraining_data_loader", ("dataset", "consumed_samples"), self._loader_with_audit)
        seams.wrap(DistributedDataParallel, "_make_backward_post_hook", ("self", "param"), self._counting_hook)
        seams.wrap(
            training,
            "train_step",
            ("forward_step_func", "data_iterator", "model", "optimizer", "opt_param_scheduler", "config"),
            self._audited_step,
        )

    # ---- the three seams ------------------------------------------------------------------------------------------

    def _loader_with_audit(self, build: Callable[..., Any]) -> Callable[..., Any]:
        train = "train"

        def build_pretraining_data_loader(dataset: Any, consumed_samples: int, *args: Any, **kwargs: Any) -> Any:
            split = getattr(dataset, "split", None) or getattr(dataset, "index_split", None)
            if dataset is None or split is None or split.name != train:
                return build(dataset, consumed_samples, *args, **kwargs)
            self._fetched.append([])
            return AuditedLoader(build(TaggedDataset(dataset), consumed_samples, *args, **kwargs), self._fetched[-1])

        return build_pretraining_data_loader

    def _counting_hook(self, make: Callable[..., Any]) -> Callable[..., Any]:
        accumulated = self._accumulated

        def _make_backward_post_hook(ddp: Any, param: torch.nn.Parameter) -> Callable[..., None]:
            add_to_buffer = make(ddp, param)
            # The first dense parameter of a chunk gets a gradient from every microbatch (an expert's may get none).
            if ddp in accumulated or not getattr(param, "allreduce", True):
                return add_to_buffer
            accumulated[ddp] = 0

            def count(*unused: Any) -> None:
                add_to_buffer(*unused)
                accumulated[ddp] += 1

            return count

        return _make_backward_post_hook

    def _audited_step(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        def audited_train_step(
            forward_step_func: Any, data_iterator: Any, model: Any, *args: Any, **kwargs: Any
        ) -> Any:
            for fetched in self._fetched:
                fetched.clear()
            for ddp in self._accumulated:
                self._accumulated[ddp] = 0
            started = time.perf_counter()
            result = train_step(forward_step_func, data_iterator, model, *args, **kwargs)
            self._iteration_done(model, result, time.perf_counter() - started)
            return result

        return audited_train_step

    # ---- the end of an iteration ----------------------------------------------------------------------------------

    def _iteration_done(self, model: list[Any], result: tuple[Any, ...], seconds: float) -> None:
        args = get_args()
        quota = get_num_microbatches()
        self._check_counts(model, quota)
        reports = (
            self._config.log_dir is not None
            and mpu.is_pipeline_last_stage(ignore_virtual=True)
            and mpu.get_tensor_model_parallel_rank() == 0
            and mpu.get_context_parallel_rank() == 0
        )
        if not reports:
            return
        size, consumed = args.micro_batch_size, args.consumed_train_samples
        # Of several chunks that read batches (multi-token prediction) each has a loader, and all read the same.
        counted = self._accumulated.get(model[-1], quota)
        mine = [microbatch_id(samples, consumed, size) for samples in self._fetched[-1][:counted]]
        replicas = _gather_by_replica(mine)
        if mpu.get_data_parallel_rank() != 0:
            return
        loss, grad_norm = result[0].get("lm loss"), result[5]
        self._write(
            Step(
                iteration=args.curr_iteration + 1,
                loss=None if loss is None else float(loss),
                grad_norm=None if grad_norm is None else float(grad_norm),
                # As Megatron will count it, not as the ids add up: the two must agree, and a reader can check it.
                consumed_samples=consumed + size * quota * mpu.get_data_parallel_world_size(),
                epoch=0,
                replicas=len(replicas),
                seconds=seconds,
                microbatches=replicas,
            )
        )

    def _check_counts(self, model: list[Any], quota: int) -> None:
        for chunk, ddp in enumerate(model):
            # A chunk without a trainable dense parameter accumulates nothing that could be counted.
            counted = self._accumulated.get(ddp, quota)
            if counted != quota:
                raise AuditError(
                    f"chunk {chunk} added the gradients of {counted} microbatches, not of its {quota}: stopping before "
                    "this step is reported as good"
                )

    def _write(self, step: Step) -> None:
        if self._file is None:
            assert self._config.log_dir is not None
            self._file = StepsFile(self._config.log_dir / "steps.jsonl", first_iteration=step.iteration)
        self._file.append(step)


def microbatch_id(samples: list[int], consumed: int, micro_batch_size: int) -> int:
    """The id j of the microbatch made of these samples, in an iteration that started at ``consumed`` samples.

    Raises AuditError if they are not the samples of one microbatch of this iteration.
    """
    j, rest = divmod(samples[0] - consumed, micro_batch_size)
    if rest or j < 0 or samples != list(range(samples[0], samples[0] + micro_batch_size)):
        raise AuditError(
            f"samples {samples} are no microbatch of the iteration that starts at sample {consumed} "
            f"(micro batch size {micro_batch_size})"
        )
    return j


def _gather_by_replica(mine: list[int]) -> dict[int, list[int]]:
    """The ids of every replica, gathered over the data-parallel ranks of this column."""
    group = mpu.get_data_parallel_group()
    ranks = mpu.get_data_parallel_world_size()
    local = torch.tensor(mine, dtype=torch.int64, device=torch.cuda.current_device())
    everyone = torch.empty(ranks * len(mine), dtype=torch.int64, device=local.device)
    torch.distributed.all_gather_into_tensor(everyone, local, group=group)
    args = get_args()
    together = data_parallel_ranks_per_replica(
        tensor=args.tensor_model_parallel_size,
        context=args.context_parallel_size,
        expert=getattr(args, "expert_model_parallel_size", 1) or 1,
        expert_tensor=getattr(args, "expert_tensor_parallel_size", None) or args.tensor_model_parallel_size,
    )
    replicas: dict[int, list[int]] = {}
    for rank, ids in enumerate(everyone.view(ranks, -1).tolist()):
        replicas.setdefault(rank // together, []).extend(ids)
    return {replica: sorted(ids) for replica, ids in replicas.items()}
