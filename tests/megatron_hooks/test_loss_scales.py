"""Loss scales of optimizers whose gradients are spread: the norm, and whose gradients overflowed."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recover_megatron.megatron_hooks.optimizer.norms import LossScales, UnitSums

DENSE, EXPERTS = 0, 1


class Fragments:
    """What is held of an optimizer's gradients: one number."""

    def __init__(self) -> None:
        self.gradient = 8.0

    def divide(self, by_scale: torch.Tensor) -> None:
        self.gradient *= float(by_scale)


class Optimizer:
    """One of Megatron's; ``scale``: None without a loss scale."""

    def __init__(self, scale: float | None) -> None:
        factor = torch.tensor([scale or 1.0])
        self.grad_scaler = scale and SimpleNamespace(scale=factor, inv_scale=factor.reciprocal())

    def _unscale_main_grads_and_check_for_nan(self) -> bool:
        raise AssertionError("asks all workers")


def scales(*of: float | None) -> tuple[LossScales, list[Optimizer], list[Fragments]]:
    optimizers, fragments = [Optimizer(scale) for scale in of], [Fragments() for _ in of]
    held: Any = fragments
    return LossScales(optimizers, held, range(len(of))), optimizers, fragments


def test_the_norm_is_that_of_gradients_divided_each_by_its_own_scale() -> None:
    found, _, _ = scales(4.0, 2.0)
    assert found.norm([UnitSums(DENSE, 9 * 16.0, 0), UnitSums(EXPERTS, 16 * 4.0, 0)]) == 5.0
    assert scales(None)[0].norm([UnitSums(DENSE, 9.0, 0), UnitSums(DENSE, 16.0, 0)]) == 5.0


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_whose_gradients_overflowed_is_told_of_that_optimizer_alone(bad: float) -> None:
    found, (dense, experts), (of_dense, of_experts) = scales(4.0, 2.0)
    told = [UnitSums(DENSE, 9.0, 0), UnitSums(EXPERTS, bad, 0), UnitSums(EXPERTS, 1.0, 0)]
    assert found.skips(told)
    with found.dividing(told):
        assert not dense._unscale_main_grads_and_check_for_nan()
        assert experts._unscale_main_grads_and_check_for_nan()
    assert (of_dense.gradient, of_experts.gradient) == (2.0, 4.0)
    assert not found.skips(told[:1])


def test_without_a_loss_scale_no_step_is_skipped() -> None:
    assert not scales(None)[0].skips([UnitSums(DENSE, math.inf, 0)])
