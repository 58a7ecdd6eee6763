"""Operations on copies: the tensors have the result afterwards, and only then; a section that repeats has its input."""

from __future__ import annotations

from typing import Any

import torch

from recover_megatron.instep.rendezvous import Kept
from recover_megatron.instep.traffic import Staged


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

    def allreduce(self, tensors: list[torch.Tensor]) -> None:
        tensors[0] *= 2

    def _reduce_scatter_base(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        output.copy_(2 * tensor[: len(output)])


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


def test_tensors_on_the_host_that_are_not_read_are_not_copied() -> None:
    backend, outputs, source = _Doubling(), [torch.zeros(3)], torch.ones(3)
    Staged().to(backend).allgather([outputs], [source], "options")
    assert backend.seen[0] is outputs[0]
    assert backend.seen[1] is source


def test_nothing_is_left_of_an_attempt_with_others() -> None:
    staged, outputs = Staged(every_result=True), [torch.zeros(1), torch.zeros(1)]
    staged.to(_Doubling()).allgather([outputs], [torch.ones(1)], "options")
    staged.to(_Doubling()).allgather([outputs[:1]], [torch.ones(1)], "options")
    staged.bring_back()
    assert [output.item() for output in outputs] == [2.0, 0.0]


def test_an_operation_in_place_that_is_interrupted_begins_again_with_its_input() -> None:
    """On the host, too: the first attempt has written over its tensor when it fails, or is not agreed upon."""
    staged, value = Staged(), torch.ones(2)
    for _ in range(3):
        staged.to(_Doubling()).allreduce([value])
        assert value.tolist() == [1.0, 1.0]
    staged.bring_back()
    assert value.tolist() == [2.0, 2.0]
    assert staged.spoiled == [value]


def test_an_output_inside_the_input_is_an_operation_in_place() -> None:
    staged, whole = Staged(), torch.tensor([1.0, 2.0, 3.0, 4.0])
    for _ in range(2):
        staged.to(_Doubling())._reduce_scatter_base(whole[:2], whole)
        assert whole.tolist() == [1.0, 2.0, 3.0, 4.0]
    staged.bring_back()
    assert whole.tolist() == [2.0, 4.0, 3.0, 4.0]


def test_a_section_that_is_run_again_finds_its_tensors_as_the_first_one_did() -> None:
    kept, first, second = Kept(), torch.ones(2), torch.zeros(2)
    for factor in (2, 3):
        kept.keep([first, second])
        first *= factor
        second += factor
    kept.restore()
    assert (first.tolist(), second.tolist()) == ([1.0, 1.0], [0.0, 0.0])
    kept.keep([first])
    first *= 2
    kept.forget()  # the section is over
    kept.restore()
    assert first.tolist() == [2.0, 2.0]
