"""Random numbers of a microbatch, as trackers of Megatron's and of Transformer Engine's kind keep them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron.core import parallel_state, tensor_parallel

from recover_megatron.megatron_hooks import rng


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
    monkeypatch.setattr(rng, "get_args", lambda: SimpleNamespace(seed=7))
    names = ("data-parallel-rng", "model-parallel-rng")
    generators = {name: torch.Generator() for name in names}
    trackers = Tracker(dict(generators)), Tracker({name: torch.Generator().get_state() for name in names})
    drawn = []
    for microbatch in (3, 4, 3):
        for tracker in trackers:
            monkeypatch.setattr(tensor_parallel, "get_cuda_rng_tracker", lambda tracker=tracker: tracker)
            rng.MicrobatchSeeds(torch.device("cpu")).seed(2, microbatch, 0)
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
