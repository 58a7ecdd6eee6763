"""The optimizer of one worker without a run: shadows, loss scales."""

from __future__ import annotations

import inspect
import math
import threading
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from recover_megatron.collectives.state.trees import flatten, unflatten
from recover_megatron.errors import UserError
from recover_megatron.hostdevice.apex_stub import FusedAdam
from recover_megatron.megatron_hooks import monkeypatch as seams
from recover_megatron.megatron_hooks.checkpoint import memory_tier
from recover_megatron.megatron_hooks.checkpoint.training_state import _load_optimizer, _optimizer_tree
from recover_megatron.megatron_hooks.fsdp.fsdp_state import _gradient_where_it_is_read
from recover_megatron.megatron_hooks.optimizer import precision, sharded_optimizer
from recover_megatron.megatron_hooks.optimizer.shadows import HostShadows, LayoutPieces, differing_units
from recover_megatron.megatron_hooks.optimizer.shard_fragments import InOrder, ShardFragment, ShardFragments, in_order
from recover_megatron.megatron_hooks.optimizer.sharded_optimizer import (
    LossScales,
    ShardedOptimizer,
    UnitSums,
    groups_with_parameters,
)
from recover_megatron.workload.shards import ElementRange
from tests.harness.waiting import DEADLINE

CLIP = 0.5
SIZES = (5, 3, 1)
HALVES = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
FULL = dict.fromkeys(HALVES, torch.float32)
MIXED = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.float32}


class Two:
    """Takes the place of ``Pieces``: own pieces in an optimizer's two groups, and a shadow of each."""

    def __init__(self, kind: Any) -> None:
        torch.manual_seed(1)
        values = [torch.randn(size) for size in SIZES]
        self.own = [_fragment(number, value.clone(), on_shadow_device=False) for number, value in enumerate(values)]
        self.shadows = [_fragment(number, value.clone(), on_shadow_device=True) for number, value in enumerate(values)]
        groups = [
            {
                "params": [fragment.tensor for fragment in self.own if fragment.group == group],
                "lr": rate,
                "weight_decay": decay,
            }
            for group, (rate, decay) in enumerate([(0.1, 0.0), (0.01, 0.3)])
        ]
        self.inner = kind(groups, eps=1e-3)

    @property
    def on_shadow_device(self) -> Iterator[ShardFragment]:
        return iter(self.shadows)

    def sum_up(self, gradients: Sequence[torch.Tensor]) -> float:
        """New finished sums; their norm."""
        for number, gradient in enumerate(gradients):
            for fragment in (self.own[number], self.shadows[number]):
                fragment.gradient.copy_(gradient)
        return float(torch.cat(list(gradients)).norm())

    def update_own(self, norm: float) -> None:
        """What Megatron does: gradients, clipping, the step; and then it clears the buffer."""
        for fragment in self.own:
            fragment.tensor.grad = fragment.gradient.clone()
            if norm > CLIP:
                fragment.tensor.grad.mul_(CLIP / (norm + 1.0e-6))
        self.inner.step()
        for fragment in [*self.own, *self.shadows]:
            fragment.gradient.zero_()
        for group in self.inner.param_groups:  # as a learning rate schedule does
            group["lr"] *= 0.9


def _fragment(number: int, tensor: torch.Tensor, *, on_shadow_device: bool) -> ShardFragment:
    size = tensor.numel()
    return ShardFragment(
        0,
        0,
        size,
        number % 2,
        tensor,
        tensor.clone(),
        torch.zeros(size),
        counts=True,
        on_shadow_device=on_shadow_device,
    )


def gradients(step: int) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(step)
    scale = 10.0 if step % 2 else 0.01  # to be clipped, and not
    return [scale * torch.randn(size, generator=source) for size in SIZES]


@pytest.mark.parametrize(
    "kind",
    [torch.optim.AdamW, FusedAdam, partial(FusedAdam, **HALVES), partial(FusedAdam, **MIXED)],
    ids=["torch", "fused", "moments-in-16-bits", "one-moment-in-16-bits"],
)
def test_a_shadow_has_the_bits_of_what_it_is_a_shadow_of_and_their_state(kind: Any) -> None:
    two = Two(kind)
    host = HostShadows([two], CLIP)  # type: ignore[list-item]
    for step in range(5):
        norm = two.sum_up(gradients(step))
        host.begin(norm, [1.0])
        two.update_own(norm)
    host.join()
    for own, shadow in zip(two.own, two.shadows, strict=True):
        assert torch.equal(own.tensor, shadow.tensor)
        its = two.inner.state[own.tensor]
        assert set(its) == set(shadow.state) >= {"exp_avg", "exp_avg_sq"}
        assert all(torch.equal(its[name], shadow.state[name]) for name in ("exp_avg", "exp_avg_sq"))
    assert set(two.inner.state) == {fragment.tensor for fragment in two.own}


@pytest.mark.parametrize("types", [FULL, HALVES, MIXED], ids=["fp32", "bf16", "one-bf16"])
@pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])
def test_main_parameters_kept_whole_are_those_that_the_optimizer_would_keep_as_remainders(
    decoupled: bool, types: dict[str, torch.dtype]
) -> None:
    """And the model's parameters and the moments, bit for bit; a step later what a checkpoint has of them, too."""
    torch.manual_seed(2)
    model = torch.randn(4000).bfloat16()
    main = model.float()
    settings: dict[str, Any] = {"lr": 0.003, "weight_decay": 0.1, "adam_w_mode": decoupled, **types}
    theirs = FusedAdam([model], master_weights=True, use_decoupled_grad=True, store_param_remainders=True, **settings)
    ours = FusedAdam([main], **settings)
    for _ in range(50):
        gradient = torch.randn(4000)
        model.decoupled_grad, main.grad = gradient, gradient.clone()
        theirs.step()
        ours.step()
        assert torch.equal(precision.nearest(main), model)
        kept = theirs.state[model]
        assert torch.equal(precision.remainder(main), kept["master_param"])
        assert torch.equal(precision.whole(model, kept["master_param"].float()), main)
        assert all(torch.equal(ours.state[main][name], kept[name]) for name in ("exp_avg", "exp_avg_sq"))


def test_a_half_is_rounded_away_from_zero_and_a_checkpoint_may_have_it_rounded_to_even() -> None:
    half = torch.tensor([0x3F808000, 0x3F818000, 0xBF808000 - 2**32, 0x3F807FFF, 0x3F808001], dtype=torch.int32)
    main = half.view(torch.float32)
    up = torch.tensor([0x3F81, 0x3F82, 0xBF81 - 2**16, 0x3F80, 0x3F81], dtype=torch.int16).view(torch.bfloat16)
    assert torch.equal(precision.nearest(main), up)
    assert not torch.equal(main.bfloat16(), up)
    for model in (up, main.bfloat16()):
        assert torch.equal(precision.whole(model, main), main)
    assert torch.equal(precision.whole(up, precision.remainder(main).float()), main)


@pytest.mark.parametrize("odd", [0x7FC00000, 0x7FFFFFFF, 0x7F800000, 0xFF800000 - 2**32, -(2**31), 1, 0], ids=hex)
@pytest.mark.parametrize("rounded", ["as where a remainder is kept", "to even"])
def test_a_number_that_is_none_does_not_make_a_checkpoint_one_of_remainders(odd: int, rounded: str) -> None:
    """NaN, infinity, a zero of either sign and the smallest number, among others and alone, come back bit for bit."""
    for others in ([], [0x3F80ABCD, 0x3F801234]):
        bits = torch.tensor([odd, *others], dtype=torch.int32)
        main = bits.view(torch.float32)
        model = main.bfloat16() if rounded == "to even" else precision.nearest(main)
        assert torch.equal(precision.whole(model, main).view(torch.int32), bits)
        assert others == [] or precision.whole(torch.zeros_like(model), main) is main  # the model is another one
        kept = precision.remainder(main).float()
        if rounded != "to even":
            assert torch.equal(precision.whole(model, kept).view(torch.int32), bits)


def test_a_configuration_by_which_transformer_engine_would_keep_main_parameters_is_refused() -> None:
    with pytest.raises(UserError, match="was created before --recover was installed"):
        precision.check(SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=True))
    precision.check(SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=False))


def test_moments_in_16_bits_that_a_whole_optimizer_is_given_are_updated_as_there() -> None:
    """As with Megatron-FSDP: each shard group has all of the state."""
    first, again = torch.ones(3), torch.zeros(3)
    there, here = (SimpleNamespace(optimizer=FusedAdam([its], **HALVES)) for its in (first, again))
    first.grad = torch.tensor([1.0, 2.0, 3.0])
    there.optimizer.step()
    _load_optimizer(here, _optimizer_tree(there, set()), set())
    here.optimizer.param_groups[0]["step"] = 1
    for tensor, one in ((first, there), (again, here)):
        tensor.grad = torch.tensor([-1.0, 0.1, 5.0])
        one.optimizer.step()
    assert torch.equal(first, again)


def test_moments_are_made_for_a_checkpoint_to_be_read_into_where_gradients_are_apart_from_their_parameters() -> None:
    """With Megatron-FSDP; Megatron itself makes none there."""
    parameter = torch.nn.Parameter(torch.ones(3))
    one = SimpleNamespace(optimizer=FusedAdam([parameter], use_decoupled_grad=True, **HALVES))
    make = inspect.unwrap(DistributedOptimizer._init_optimizer_states_with_dummy_values)
    make(one)
    assert not one.optimizer.state
    _gradient_where_it_is_read(make)(one)
    assert {name: its.dtype for name, its in one.optimizer.state[parameter].items()} == {
        "exp_avg": torch.bfloat16,
        "exp_avg_sq": torch.bfloat16,
    }
    assert parameter.decoupled_grad is None


def test_a_state_that_came_from_another_worker_is_updated_as_there() -> None:
    """Transformer Engine's optimizer has a scale for each moment that is not in float32."""
    first, again = torch.ones(3), torch.ones(3)
    there, here = FusedAdam([first], **HALVES), FusedAdam([again], **HALVES)
    first.grad = torch.tensor([1.0, 2.0, 3.0])
    there.step()
    again.copy_(first)
    here.param_groups[0]["step"] = 1
    here.state[again] = {name: value.clone() for name, value in there.state[first].items()}
    precision.set_scales(here, [(again, here.state[again])])
    for tensor, optimizer in ((first, there), (again, here)):
        tensor.grad = torch.tensor([-1.0, 0.1, 5.0])
        optimizer.step()
    assert torch.equal(first, again)
    precision.set_scales(here, [])
    with pytest.raises(KeyError):
        here.step()


def test_the_training_goes_on_while_shadows_are_updated_and_the_next_update_waits_for_them() -> None:
    go = threading.Event()

    class Slow(FusedAdam):
        def step(self, closure: None = None) -> None:
            if threading.current_thread() is not threading.main_thread():
                assert go.wait(DEADLINE)
            super().step(closure)

    two = Two(Slow)
    host = HostShadows([two], CLIP)  # type: ignore[list-item]
    before = [fragment.tensor.clone() for fragment in two.shadows]
    norm = two.sum_up(gradients(0))
    host.begin(norm, [1.0])
    two.update_own(norm)  # done, and nothing has happened to the shadows
    assert all(torch.equal(old, fragment.tensor) for old, fragment in zip(before, two.shadows, strict=True))
    go.set()
    norm = two.sum_up(gradients(1))
    host.begin(norm, [1.0])  # waits for the first one
    two.update_own(norm)
    host.join()
    assert all(torch.equal(own.tensor, shadow.tensor) for own, shadow in zip(two.own, two.shadows, strict=True))


def test_what_goes_wrong_with_a_shadow_is_a_fault_of_this_worker_at_the_next_update() -> None:
    class Failing(FusedAdam):
        def step(self, closure: None = None) -> None:
            if threading.current_thread() is not threading.main_thread():
                raise RuntimeError("no memory left")

    two = Two(Failing)
    host = HostShadows([two], CLIP)  # type: ignore[list-item]
    host.begin(two.sum_up(gradients(0)), [1.0])
    with pytest.raises(RuntimeError, match="no memory left"):
        host.join()


def test_without_shadows_aside_nothing_is_started() -> None:
    two = Two(FusedAdam)
    two.shadows.clear()
    before = threading.active_count()
    HostShadows([two], CLIP).begin(1.0, [1.0])  # type: ignore[list-item]
    assert threading.active_count() == before


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


def test_shadows_that_differ_are_those_of_one_optimizer_one_column_and_one_unit() -> None:
    dense, experts, others = (0, 0), (1, 0), (1, 1)
    rows = [
        [*dense, 4, 11, *dense, 3, 12, *experts, 4, 21],
        [*dense, 3, 12, *others, 4, 99],  # its experts are others: what it says of unit 4 is of no concern to the first
        [*experts, 4, 21, *experts, 2, 22],
    ]
    assert differing_units(rows) == []
    assert differing_units([*rows, [*dense, 3, 13]]) == [3]
    assert differing_units([]) == []


def test_the_parameters_of_a_model_are_given_back_with_its_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that builds the model of another position has no room for both."""
    wrapped: list[Any] = []
    monkeypatch.setattr(seams, "wrap", lambda seam, wrapper: wrapped.append(wrapper))
    monkeypatch.setattr(precision, "install", lambda: None)
    monkeypatch.setattr(precision, "check", lambda config: None)
    sharded_optimizer.install()

    class Optimizer:
        config = None

    def init(self: Any, optimizer: Any) -> None:
        self.optimizer = optimizer

    Optimizer.__init__ = wrapped[0](init)  # type: ignore[method-assign]
    parameter = torch.zeros(1)
    groups = [{"params": []}, {"params": [parameter]}]
    one = Optimizer(SimpleNamespace(param_groups=groups))  # type: ignore[call-arg]
    groups[1]["params"] = [torch.zeros(1)]  # Megatron puts shards into their place
    assert groups_with_parameters(one) == groups[1:]
    kept = weakref.ref(parameter)
    del parameter, one
    assert kept() is None


def test_while_the_norm_of_all_parameters_is_computed_nobody_is_said_to_write_a_checkpoint() -> None:
    marks: list[str] = []
    optimizer: Any = object.__new__(ShardedOptimizer)
    optimizer.complete, optimizer.shards, optimizer._fragments = (lambda: None), None, []
    optimizer._keeping = SimpleNamespace(has_all=True)
    optimizer._manager = SimpleNamespace(
        mark=lambda phase, **_: marks.append(phase),
        view=SimpleNamespace(groups=None, live=frozenset()),
        section=lambda _, run: run(),
    )
    for moments in (False, True):
        with ShardedOptimizer.saving(optimizer, moments=moments):
            pass
    assert marks == ["parameters' norm", "checkpoint"]


class FirstRank:
    """Takes the place of a process group."""

    def rank(self) -> int:
        return 0


def pieces_of(*sizes: int, moments: bool = False) -> ShardFragments:
    """Of one bucket with parameters of these sizes a worker holds all, each parameter as one piece."""
    ends = list(accumulate(sizes))
    parameters = [torch.nn.Parameter(torch.empty(size)) for size in sizes]
    places = {its: (end - its.numel(), end) for its, end in zip(parameters, ends, strict=True)}
    bucket = SimpleNamespace(
        params_list=parameters, param_to_index=places, param_data=torch.randn(ends[-1]), grad_data=torch.zeros(ends[-1])
    )
    inner = SimpleNamespace(param_groups=[{"params": []}], state={})
    optimizer = SimpleNamespace(optimizer=inner, tp_group=FirstRank())
    made = ShardFragments(optimizer, {0: bucket}, dict.fromkeys(parameters, 0), None)
    pieces = made.make({0: [(0, ends[-1])]}, shadow=False)
    for piece in pieces if moments else ():
        piece.state = {"step": torch.tensor(3.0), "exp_avg": torch.randn(piece.stop - piece.start)}
    made.install({0: pieces})
    return made


def layout_pieces(held: ShardFragments) -> LayoutPieces:
    nothing: Any = None
    return LayoutPieces([held], nothing, nothing, nothing)


def test_state_that_changes_hands_arrives_in_the_memory_that_keeps_it() -> None:
    giver = pieces_of(50, 30, moments=True)
    taker = pieces_of(50, 30)
    ranges = [ElementRange(0, 10, 60), ElementRange(0, 60, 80)]
    text, given = flatten(layout_pieces(giver)._give(ranges))
    place, take = layout_pieces(taker)._receive(ranges, [taker.held])
    tree, arrived = unflatten(text, place)
    for own, its in zip(arrived, given, strict=True):
        own.copy_(its)
    take(tree)
    memory = {piece.state["exp_avg"].untyped_storage().data_ptr() for piece in taker}
    besides = sum(its.nbytes for its in arrived if its.untyped_storage().data_ptr() not in memory)
    assert besides == sum(its.nbytes for its in arrived if not its.dim())  # the numbers of steps
    first, second = taker
    assert torch.equal(first.state["exp_avg"][10:], next(iter(giver)).state["exp_avg"][10:])
    assert torch.equal(second.state["exp_avg"], list(giver)[1].state["exp_avg"])
    assert (first.state["step"], second.state["step"]) == (3, 3)


def give(held: ShardFragments, pieces: InOrder) -> None:
    assert len(held.give(ElementRange(0, 0, 512))) == len(pieces[0])


def take(held: ShardFragments, pieces: InOrder) -> None:
    left = {id(piece): 2 for piece in held}
    for at in range(0, 512, 2):
        of_snapshot = {"bucket": 0, "start": at, "stop": at + 2, "master": None, "state": {}}
        memory_tier._take(of_snapshot, pieces, left)
    assert not any(left.values())


@pytest.mark.parametrize("use", [give, take], ids=["given", "taken from a snapshot"])
def test_pieces_are_found_without_looking_at_all_of_them(monkeypatch: pytest.MonkeyPatch, use: Any) -> None:
    held, looked = pieces_of(*[2] * 256), 0
    pieces = in_order(held)

    def start(piece: ShardFragment) -> int:
        nonlocal looked
        looked += 1
        return int(vars(piece)["start"])

    monkeypatch.setattr(ShardFragment, "start", property(start), raising=False)
    use(held, pieces)
    assert looked < 256 * 20
