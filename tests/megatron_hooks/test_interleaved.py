"""What Megatron's interleaved schedule takes is what ``workload.assign`` says, and larger groups cost no time.

The schedule's order of work is Megatron's own (``get_schedule_table``, ``get_pp_rank_microbatches``); how long it takes
is computed from who waits for whom, with a forward pass of a chunk of one unit of time and a backward pass of two.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from megatron.core.pipeline_parallel import schedules

from recover_megatron.workload import quotas
from recover_megatron.workload.assign import group_size, runs

FORWARD, BACKWARD = 1, 2
Work = tuple[int, int, int, int]
"""How long it takes (and so which pass it is), microbatch, chunk, stage."""


def order(count: int, stages: int, chunks: int, group: int, stage: int) -> Iterator[Work]:
    """What one stage does, in its order: forward passes, then one forward and one backward in turn, then backward."""
    communicator = SimpleNamespace(
        pp_group=SimpleNamespace(size=lambda: stages, rank=lambda: stage), virtual_pipeline_model_parallel_size=chunks
    )
    total, _, warmup, _ = schedules.get_pp_rank_microbatches(count, chunks, group, p2p_communicator=communicator)
    table = schedules.get_schedule_table(count, chunks, group)
    for k in range(total + warmup):
        if k < total:
            yield (FORWARD, *table[k], stage)
        if k >= warmup:
            microbatch, chunk = table[k - warmup]
            yield BACKWARD, microbatch, chunks - 1 - chunk, stage


def needs(work: Work, stages: int, chunks: int) -> Work | None:
    """What must be done before; None: it is the first of its microbatch."""
    seconds, microbatch, chunk, stage = work
    place = chunk * stages + stage  # among all the chunks of layers, from the embedding to the loss
    if seconds == FORWARD:
        return (FORWARD, microbatch, *divmod(place - 1, stages)) if place else None
    if place == chunks * stages - 1:
        return FORWARD, microbatch, chunk, stage
    return (BACKWARD, microbatch, *divmod(place + 1, stages))


@functools.cache
def seconds(count: int, stages: int, chunks: int, group: int) -> tuple[float, int]:
    """How long a pass takes, and the most chunks' activations that the first stage keeps; a deadlock fails."""
    queues = [list(order(count, stages, chunks, group, stage)) for stage in range(stages)]
    done: dict[Work, int] = {}
    at, clock = [0] * stages, [0] * stages
    while any(at[stage] < len(queues[stage]) for stage in range(stages)):
        before = sum(at)
        for stage, queue in enumerate(queues):
            while at[stage] < len(queue):
                work = queue[at[stage]]
                first = needs(work, stages, chunks)
                if first is not None and first not in done:
                    break
                clock[stage] = max(clock[stage], done[first] if first else 0) + work[0]
                done[work] = clock[stage]
                at[stage] += 1
        assert sum(at) > before, f"a deadlock with {count} microbatches in groups of {group}: {at}"
    assert len(done) == 2 * count * chunks * stages
    kept, most = 0, 0
    for work in queues[0]:
        kept += 1 if work[0] == FORWARD else -1
        most = max(most, kept)
    return max(clock), most


@pytest.mark.parametrize(("stages", "chunks"), [(2, 2), (2, 4), (3, 2), (4, 2), (4, 3), (8, 2)])
def test_any_number_of_microbatches_runs_without_a_bubble_more_than_its_pipeline_has(stages: int, chunks: int) -> None:
    for count in range(stages, 5 * stages + 1):
        group = group_size(count, stages, stages)
        took, kept = seconds(count, stages, chunks, group)
        assert took == (count * chunks + stages - 1) * (FORWARD + BACKWARD), (count, group)
        assert kept <= (chunks - 1) * group + 2 * (stages - 1) + 1, (count, group)


@pytest.mark.parametrize(
    ("replicas", "stages", "chunks", "batch"), [(64, 8, 2, 2048), (64, 8, 4, 2048), (128, 16, 2, 2048), (4, 2, 2, 16)]
)
def test_after_one_loss_a_step_is_within_a_twentieth_of_the_best_that_whole_microbatches_allow(
    replicas: int, stages: int, chunks: int, batch: int
) -> None:
    left = quotas(batch, range(replicas - 1), least=stages)
    took = max(seconds(count, stages, chunks, group_size(count, stages, stages))[0] for count in set(left.values()))
    most = -(-batch // (replicas - 1))
    best = most * chunks * (FORWARD + BACKWARD)  # without any bubble
    bubble = (stages - 1) * (FORWARD + BACKWARD)
    assert took <= 1.05 * (best + bubble)
    assert max(left.values()) == most


class Fit(Exception):
    """The schedule has accepted the numbers."""


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_the_schedule_takes_exactly_the_sizes_that_are_said_to_run(
    monkeypatch: pytest.MonkeyPatch, stages: int
) -> None:
    def accepted(*args: object, **options: object) -> None:
        raise Fit

    monkeypatch.setattr(schedules, "get_pp_rank_microbatches", accepted)  # called when the numbers were checked
    monkeypatch.setattr(schedules, "get_model_type", lambda model: None)
    monkeypatch.setattr(schedules.torch, "zeros", lambda *args, **kwargs: 0)
    config = SimpleNamespace(
        overlap_p2p_comm=False, batch_p2p_comm=True, no_sync_func=None, grad_sync_func=None, param_sync_func=None,
        timers=None, microbatch_group_size_per_vp_stage=0, finalize_model_grads_func=None,
        hidden_size=1, sequence_parallel=False, overlap_moe_expert_parallel_comm=False,
    )  # fmt: skip
    monkeypatch.setattr(schedules, "get_model_config", lambda model: config)
    group = SimpleNamespace(size=lambda: stages, rank=lambda: 0)
    collection = SimpleNamespace(tp=group, cp=group, pp=group, embd=group, pos_embd=group, dp_cp=group)
    taken = {}
    for count in range(1, 4 * stages):
        for size in range(1, 4 * stages):
            config.microbatch_group_size_per_vp_stage = size
            try:
                schedules.forward_backward_pipelining_with_interleaving(
                    forward_step_func=None, data_iterator=[None, None], model=[schedules.torch.nn.Module()] * 2,
                    num_microbatches=count, seq_length=1, micro_batch_size=1,
                    p2p_communicator=SimpleNamespace(config=config, pp_group=group), pg_collection=collection,
                )  # fmt: skip
            except Fit:
                taken[count, size] = True
            except (ValueError, RuntimeError) as error:
                taken[count, size] = "micro-batches" not in str(error)  # another error would be none of the numbers'
    assert taken == {(count, size): runs(count, stages, size) for count, size in taken}
    assert True in taken.values()
