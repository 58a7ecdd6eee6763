"""Random numbers of a microbatch, as trackers of Megatron's and of Transformer Engine's kind keep them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state, tensor_parallel

from recover_megatron.instep.decision import Rollback as Target
from recover_megatron.megatron_hooks import microbatches, rejoin


class Tracker:
    """The part of a tracker that is used; Transformer Engine's holds generators, which its layers keep."""

    def __init__(self, states: dict[str, torch.Generator] | dict[str, torch.Tensor]) -> None:
        self.states = states

    def get_states(self) -> dict[str, object]:
        return dict(self.states)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self.states = states


def test_generators_of_transformer_engine_are_seeded_in_place_with_the_numbers_of_the_microbatch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for getter in ("pipeline_model_parallel", "tensor_model_parallel", "context_parallel", "expert_model_parallel"):
        monkeypatch.setattr(parallel_state, f"get_{getter}_rank", lambda: 1)
    monkeypatch.setattr(microbatches, "get_args", lambda: SimpleNamespace(seed=7))
    names = ("data-parallel-rng", "model-parallel-rng")
    generators = {name: torch.Generator() for name in names}
    trackers = Tracker(dict(generators)), Tracker({name: torch.Generator().get_state() for name in names})
    drawn = []
    for microbatch in (3, 4, 3):
        for tracker in trackers:
            monkeypatch.setattr(tensor_parallel, "get_cuda_rng_tracker", lambda tracker=tracker: tracker)
            microbatches.MicrobatchSeeds(torch.device("cpu")).seed(2, microbatch, 0)
        assert trackers[0].states == generators
        drawn.append([torch.rand(4, generator=generators[name]) for name in names])
        for name, numbers in zip(names, drawn[-1], strict=True):
            generator = torch.Generator()
            generator.set_state(trackers[1].states[name])
            assert torch.equal(torch.rand(4, generator=generator), numbers)
    first, other, again = map(torch.stack, drawn)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first[0], first[1])


@pytest.mark.parametrize(
    "kept",
    [list, lambda states: SimpleNamespace(data=states), lambda states: {"(0, 1)": states}],
    ids=["torch", "torch_dist", "fsdp_dtensor"],
)
@pytest.mark.parametrize(("living", "expected"), [("abc", "abcc"), ("a", "aaaa"), ("abcd", "abcd"), ("abcde", "abcde")])
def test_a_checkpoint_has_as_many_random_states_as_the_launch_has_replicas(
    monkeypatch: pytest.MonkeyPatch, kept: Callable[[list[str]], Any], living: str, expected: str
) -> None:
    def gathered(ckpt_format: str) -> Any:
        """As Megatron 0.18 makes them: a list by its count of the replicas, filled by those who are asked."""
        states = [""] * parallel_state.get_data_parallel_world_size()
        for number, state in enumerate(living):
            states[number] = state
        return kept(states)

    args = SimpleNamespace(data_parallel_random_init=True, data_parallel_size=4)
    monkeypatch.setattr(microbatches, "get_args", lambda: args)
    monkeypatch.setattr(parallel_state, "_MPU_DATA_PARALLEL_WORLD_SIZE", 4)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    group = SimpleNamespace(size=lambda: len(living))
    monkeypatch.setattr(parallel_state, "get_data_parallel_group", lambda **named: group)
    found = kept_states(microbatches._as_many_as_launched(gathered)("any"))
    assert "".join(found) == expected
    args.data_parallel_random_init = False
    assert len(kept_states(microbatches._as_many_as_launched(gathered)("any"))) == len(living)


def test_who_goes_back_reads_no_random_states_where_there_is_one_for_each_replica_of_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    args = SimpleNamespace(no_save_rng=False, no_load_rng=False, data_parallel_random_init=True)
    read = []

    def load_checkpoint(*args_: Any, **named: Any) -> tuple[int, int]:
        read.append(not args.no_load_rng)
        return 7, 0

    monkeypatch.setattr(rejoin, "get_args", lambda: args)
    monkeypatch.setattr(rejoin, "checkpointing", SimpleNamespace(load_checkpoint=load_checkpoint))
    unused: Any = None
    groups: Any = SimpleNamespace(in_section=nullcontext)
    going_back = rejoin.Rollback(unused, groups, unused, unused, unused, unused)
    for args.data_parallel_random_init in (True, False):
        going_back._load(Target(7, "load", 0), unused, unused, unused)
    assert (read, args.no_load_rng) == ([False, True], False)


def kept_states(found: Any) -> list[str]:
    inside = getattr(found, "data", found)
    return next(iter(inside.values())) if isinstance(inside, dict) else inside
