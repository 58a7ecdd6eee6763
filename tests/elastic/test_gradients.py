"""Which parameters have a gradient at the update: those that some microbatch of the step has used, and no others."""

from __future__ import annotations

import pytest
import torch

from recover_megatron.collectives.ledger import Span
from recover_megatron.elastic.epoch_start import LatestState, Status, odd_cover
from recover_megatron.elastic.gradients import Gradients


def parameters(*trained: bool) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(2), requires_grad=its) for its in trained]


def add(gradients: Gradients, j: int, *used: torch.Tensor) -> None:
    loss = torch.stack([parameter.sum() for parameter in used]).sum()
    loss.backward()
    gradients.count(j, loss)


def summed(*workers: Gradients) -> None:
    """What an all-reduce leaves on every worker."""
    for buckets in zip(*(its.buckets for its in workers), strict=True):
        total = torch.stack([bucket.flat for bucket in buckets]).sum(0)
        for bucket in buckets:
            bucket.flat.copy_(total)


def test_a_parameter_has_a_gradient_where_a_microbatch_of_any_worker_has_used_it() -> None:
    models = [parameters(True, True, True) for _ in range(2)]
    both = [Gradients(model, 2) for model in models]
    add(both[0], 0, models[0][0])
    add(both[1], 1, models[1][0], models[1][1])
    summed(*both)
    for gradients, model in zip(both, models, strict=True):
        assert gradients.loss() == 6
        gradients.leave_out_unused()
        grads = [None if its.grad is None else its.grad.tolist() for its in model]
        assert grads == [[2, 2], [1, 1], None]
        gradients.clear()
        assert model[2].grad is not None
        assert model[2].grad.tolist() == [0, 0]


def test_a_gradient_that_sums_to_zero_was_given_and_one_that_autograd_did_not_write_counts() -> None:
    model = parameters(True, True, True)
    gradients = Gradients(model, 2)
    for j, sign in enumerate((1, -1)):
        loss = (sign * model[0]).sum()
        loss.backward()
        gradients.count(j, loss)
    assert model[1].grad is not None
    model[1].grad += 3
    gradients.loss()
    gradients.leave_out_unused()
    assert [its.grad is None for its in model] == [False, False, True]


def test_a_layer_that_is_frozen_later_is_left_alone_as_by_plain_torch() -> None:
    def train(steps: int, *, plain: bool) -> list[float]:
        model = parameters(True, True)
        optimizer = torch.optim.AdamW(model, lr=0.1, weight_decay=0.5)
        gradients = None if plain else Gradients(model, 1)
        for step in range(steps):
            if gradients is None:
                optimizer.zero_grad()
                sum((its * 3).sum() for its in model if its.requires_grad).backward()  # type: ignore[union-attr]
            else:
                gradients.clear()
                add(gradients, 0, *(its * 3 for its in model))
                gradients.loss()
                gradients.leave_out_unused()
            optimizer.step()
            if step == 2:
                model[0].requires_grad_(False)
        return [its[0].item() for its in model]

    assert train(6, plain=False) == train(6, plain=True)
    assert train(6, plain=False)[0] == train(3, plain=True)[0]


def test_a_parameter_that_is_unfrozen_gets_memory_and_those_that_never_are_cost_none() -> None:
    model = parameters(True, False, False)
    gradients = Gradients(model, 1)
    assert sum(bucket.flat.numel() for bucket in gradients.buckets) == 2 + (1 + 1 + 1)
    assert not gradients.grow()
    model[1].requires_grad_(True)
    assert gradients.grow()
    assert sum(bucket.flat.numel() for bucket in gradients.buckets) == 4 + (1 + 1 + 2)
    gradients.clear()
    add(gradients, 0, model[0], model[1])
    assert gradients.loss() == 4
    gradients.leave_out_unused()
    assert [its.grad is None for its in model] == [False, False, True]
    model[0].requires_grad_(False)
    assert not gradients.grow(), "what is frozen again keeps its memory"
    model[2].requires_grad_(True)
    assert gradients.grow()
    assert sum(bucket.flat.numel() for bucket in gradients.buckets) == 6 + (1 + 1 + 3)


@pytest.mark.parametrize("written", [False, True])
def test_sums_that_come_before_a_step_begins_are_kept_for_it_unless_a_script_writes_to_them(written: bool) -> None:
    """A worker joins in the middle of a sum of the others, and pulls what is finished of it with the state."""
    model = parameters(True)
    gradients = Gradients(model, 1)
    gradients.buckets[0].flat[:2] = 5
    gradients.buckets[0].ledger.mark(Span(0, 2), 3)
    gradients.hold()
    (model[0].grad.zero_ if written else model[0].grad.sum)()
    model[0].grad = None  # as of zero_grad(), which is no writing
    assert gradients.clear() != written, "if they are written to, they are pulled again"
    assert model[0].grad.tolist() == ([0, 0] if written else [5, 5])
    assert bool(gradients.buckets[0].ledger.reduced) != written
    assert gradients.clear(), "those of the last step are not kept for the next"
    assert not gradients.buckets[0].ledger.reduced


def test_what_is_used_is_told_by_the_numbers_that_the_parameters_have_now() -> None:
    model = parameters(False, True)
    gradients = Gradients(model, 1)
    model[0].requires_grad_(True)
    assert gradients.grow()
    gradients.clear()
    add(gradients, 0, model[1])
    gradients.loss()
    gradients.leave_out_unused()
    assert [its.grad is None for its in model] == [True, False]


def test_a_gradient_of_a_parameter_that_was_frozen_when_the_step_began_is_refused() -> None:
    model = parameters(True, False)
    model[1].grad = torch.ones(2)
    gradients = Gradients(model, 2)
    gradients.clear()
    assert model[1].grad is None, "one from before the training is not stepped with"
    add(gradients, 0, model[0], model[1])
    model[1].requires_grad_(True)
    with pytest.raises(RuntimeError, match="frozen when the step began"):
        add(gradients, 1, model[0], model[1])


def test_a_worker_that_comes_covers_and_trains_what_the_others_do() -> None:
    model, here = parameters(True, True, False), parameters(True, False, True)
    theirs, mine = Gradients(model, 1), Gradients(here, 1)
    model[0].requires_grad_(False)
    assert mine.cover(theirs.covered)
    assert not mine.cover(theirs.covered)
    assert [its.requires_grad for its in here] == [True, False, True], "what is covered may be frozen"
    mine.train(theirs.trained)
    assert [its.requires_grad for its in here] == [False, True, False]
    assert [its.grad is None for its in here] == [False, False, True]
    assert [b.flat.numel() for b in mine.buckets] == [b.flat.numel() for b in theirs.buckets]
    mine.clear()
    add(mine, 0, here[1])
    mine.loss()
    mine.leave_out_unused()
    assert [its.grad is None for its in here] == [True, False, True]
    for wrong in ("0", "8", "f0"):
        with pytest.raises(ValueError, match="do not fit a model with 3"):
            mine.cover(wrong)


def test_a_fused_optimizer_steps_with_the_gradient_of_each_element_whatever_the_order_in_memory() -> None:
    def trained(*, fused: bool) -> torch.Tensor:
        torch.manual_seed(1)
        model = torch.nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        gradients = Gradients(list(model.parameters()), 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        for _ in range(3):
            gradients.clear()
            loss = model(torch.randn(1, 3, 4, 4)).square().sum()
            loss.backward()
            gradients.count(0, loss)
            optimizer.step()
        assert model.weight.grad is not None
        assert model.weight.grad.stride() == model.weight.stride() != model.weight.contiguous().stride()
        return model.weight.detach()

    torch.testing.assert_close(trained(fused=True), trained(fused=False))


@pytest.mark.parametrize(
    ("told", "odd"),
    [
        ({0: (7, "3"), 1: (7, "3"), 4: (0, "1")}, None),
        ({0: (7, "3"), 1: (7, "1"), 4: (0, "1")}, 1),
        ({0: (6, "1"), 1: (7, "3"), 4: (0, "1")}, None),
        ({0: (7, "1"), 1: (6, "1"), 2: (7, "3")}, 2),
    ],
    ids=["alike", "one has unfrozen a layer", "one has not finished the step", "two that have"],
)
def test_a_worker_that_alone_unfreezes_a_layer_is_named(told: dict[int, tuple[int, str]], odd: int | None) -> None:
    statuses = {worker: Status(its, worker != 4, covered=covered) for worker, (its, covered) in told.items()}
    holders = tuple(worker for worker in told if worker != 4)
    assert odd_cover(statuses, LatestState(7, holders)) == odd
