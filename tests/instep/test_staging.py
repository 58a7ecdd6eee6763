"""Operations on copies in host memory: the tensors have the result afterwards, and only then."""

from __future__ import annotations

from typing import Any

import torch

from recover_megatron.instep.staging import Staged


class _Doubling:
    """A backend whose operations double the tensors they are given, wherever these are in the arguments."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> str:
        assert opts == "options"
        for output in outputs[0]:
            output.copy_(2 * inputs[0])
        self.seen = [*outputs[0], *inputs]
        return "work"


def test_a_result_reaches_the_tensors_when_it_is_brought_back() -> None:
    whole = torch.zeros(2, 6)
    outputs, source = list(whole[:, ::2]), torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    backend, staged = _Doubling(), Staged(away=lambda tensor: True)

    assert staged.to(backend).allgather([outputs], [source], "options") == "work"
    assert all(tensor.is_contiguous() for tensor in backend.seen)
    assert not whole.any()  # a revocation here leaves everything as it was

    staged.bring_back()
    assert torch.equal(whole[:, ::2], torch.tensor([[2.0, 4.0, 6.0]] * 2))
    assert not whole[:, 1::2].any()
    assert source.tolist() == [1.0, 2.0, 3.0]


def test_tensors_on_the_host_are_not_copied() -> None:
    backend, outputs, source = _Doubling(), [torch.zeros(3)], torch.ones(3)
    Staged().to(backend).allgather([outputs], [source], "options")
    assert backend.seen[0] is outputs[0]
    assert backend.seen[1] is source
