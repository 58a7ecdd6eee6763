"""Megatron-FSDP: a shard group is a replica, and a death in one changes nothing but rounding.

Every worker's shards of the parameters are compared.  With --outer-dp-sharding-strategy optim the optimizer's state is
spread over the shard groups and survives by shadows; what Megatron 0.19.2 itself does with this flag is not what plain
data parallelism does, so the numbers are those of ``no_shard``.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from recover_megatron.arguments import RecoverConfig
from recover_megatron.collectives.ledger import Span
from recover_megatron.errors import Disagreement, UserError
from recover_megatron.instep.trainer import Gradients
from recover_megatron.megatron_hooks.fsdp import fsdp_state, version2
from recover_megatron.megatron_hooks.fsdp.fsdp_buckets import FsdpBuckets2
from recover_megatron.megatron_hooks.fsdp.fsdp_refused import cannot_shard_model
from recover_megatron.megatron_hooks.fsdp.version2 import padding
from recover_megatron.membership.records import EXIT_STATE_LOST
from tests.drawn import some
from tests.instep import hsdp
from tests.instep.cells import PHASES
from tests.instep.conftest import Reference, Runs
from tests.instep.hsdp import second
from tests.instep.logged import console, differences
from tests.instep.runs import GRAD_NORM, Case, Layout, Result, Strike, check, check_rows, check_sharded, check_steps
from tests.instep.test_features import check_biases
from tests.megatron_hooks.tiny import OURS, STOCK

DEATH = (Strike(1, 1, 3, "backward"),)
DEATH_OF_FOUR = (Strike(1, 2, 3, "backward"),)
"""In a shard group of four workers."""
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
MTP = "--mtp-num-layers 1 --position-embedding-type rope"
PHASES_OF_SECOND = [phase for phase in PHASES if phase != "checkpoint"]
"""Megatron writes no checkpoint of version 2."""
TWO_SHADOWS = ("--recover-shadow-shards", "2")
FINE = "--megatron-fsdp-enable-fine-grained-param-gather"


def check_as(runs: Runs, case: Case, replicas: int | None = None) -> Result:
    """As near as its numbers allow; the state too, where that is spread over the shard groups."""
    by = check_sharded if case.layout in hsdp.UNSHARDED else check
    return runs.check(case, hsdp.NEAR.get(case.layout, 1.0), by=by, replicas=replicas)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", some("hsdp parity", [*hsdp.LAYOUTS, *hsdp.OTHERS], 1), ids=lambda layout: layout.name
)
def test_without_a_death_every_number_is_that_of_megatron_alone(runs: Runs, layout: Layout) -> None:
    # The plain script does not split a context.
    runs.check_stock(Case(layout), near=0.1, script=OURS if layout.context > 1 else STOCK)


@pytest.mark.slow
@pytest.mark.parametrize("case", hsdp.drawn("hsdp faults", hsdp.LAYOUTS, PHASES, 2), ids=str)
def test_a_fault_in_a_shard_group_changes_nothing_but_rounding(runs: Runs, case: Case) -> None:
    check_as(runs, case)


WITH_FLAGS = {
    "sequence-parallel": Case(hsdp.with_flags(hsdp.TENSOR, "sp", "--sequence-parallel"), DEATH),
    "tensor and expert parallelism": Case(hsdp.TENSOR_EXPERTS, DEATH_OF_FOUR),
    "a context split in two in shard groups of four": Case(hsdp.CONTEXT_FOUR, DEATH_OF_FOUR),
    "shard groups of four": Case(hsdp.FOUR, DEATH_OF_FOUR),
    "both shard groups broken": Case(hsdp.TWO, (Strike(0, 1, 3, "backward"), Strike(1, 0, 3, "forward"))),
    "recomputation": Case(hsdp.with_flags(hsdp.TWO, "recompute", RECOMPUTE), DEATH),
    "per-token loss": Case(hsdp.with_flags(hsdp.TWO, "per-token", "--calculate-per-token-loss"), DEATH),
    "multi-token prediction": Case(hsdp.with_flags(hsdp.TWO, "mtp", MTP), DEATH),
    "nothing to run": Case(hsdp.TWO, (Strike(0, 1, 5, "backward"),)).altered("faulty.idle", 1),
    "nothing to run, per-token loss": Case(
        hsdp.with_flags(hsdp.TWO, "per-token", "--calculate-per-token-loss"), (Strike(0, 1, 5, "backward"),)
    ).altered("faulty.idle", 1),
    "norm of the parameters": Case(hsdp.with_flags(hsdp.TWO, "norm", "--log-params-norm"), DEATH),
    "a death in a checkpoint": Case(hsdp.TWO, (Strike(1, 1, 4, "checkpoint"),)),
    "one shard group that was asked for": Case(hsdp.ASKED_FOR_ONE, DEATH),
    "weights that are made shard by shard": Case(
        hsdp.with_flags(hsdp.TWO, "meta", "--init-model-with-meta-device"), DEATH, 30, restarts=1
    ),
    "biases of routers": Case(hsdp.BIASES, (Strike(1, 2, 3, "reduce-scatter"),), 7),
    "forward passes beside backward passes": Case(hsdp.BESIDE, (Strike(1, 2, 3, "backward", visit=2),), 12, restarts=1),
    "native collective": Case(hsdp.TWO, DEATH).over_nccl(),
    "quantiles of routers": Case(hsdp.QUANTILES, (Strike(1, 2, 3, "reduce-scatter"),), 7),
}
WITH_A_NEWCOMER = {
    name: Case(layout, (strike,), 10, restarts=1).patient("5-:2")
    for name, layout, strike in (
        ("double buffers, forward", hsdp.DOUBLE, Strike(1, 1, 3, "forward", visit=2)),
        ("double buffers, backward", hsdp.DOUBLE, Strike(1, 0, 3, "backward", visit=2)),
        ("double buffers of any size", hsdp.DOUBLE_MAX, Strike(1, 1, 3, "backward", visit=2)),
        ("fine-grained gathering", hsdp.with_flags(hsdp.TWO, "fine", FINE), *DEATH),
        ("moments of 16 bits", hsdp.HALF_MOMENTS, *DEATH),
        ("moments and gradients of 16 bits", hsdp.HALF, *DEATH),
    )
}
"""Who was interrupted trains on, too, from iteration 5 at the latest."""
WITH_FLAGS |= WITH_A_NEWCOMER


@pytest.mark.slow
@pytest.mark.parametrize("name", some("hsdp flags", list(WITH_FLAGS), 1))
def test_with_what_else_is_taken_a_death_changes_nothing_but_rounding(runs: Runs, name: str) -> None:
    case = WITH_FLAGS[name]
    result = check_as(runs, case, replicas=2 if name in WITH_A_NEWCOMER else None)
    if case.layout is hsdp.ASKED_FOR_ONE:
        assert "--use-megatron-fsdp with one shard group: there are two" in result.log(0)
    if case.layout in (hsdp.BIASES, hsdp.QUANTILES):
        check_biases(result, runs.reference(case))


ROWS = {
    "down-to-one-shard-group": (Strike(0, 1, 2, "backward", visit=2), Strike(2, 1, 4, "reduce-scatter")),
    "both-at-once": (Strike(0, 1, 3, "backward"), Strike(1, 0, 3, "forward")),
    "in-the-recovery-of-another": (Strike(0, 1, 2, "forward"), Strike(2, 1, 2, "recovery", visit=2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("row", some("hsdp rows", list(ROWS), 1))
@pytest.mark.parametrize(
    "layout", some("hsdp row layouts", [hsdp.THREE, hsdp.OPTIMIZER_THREE], 1), ids=lambda its: its.name
)
def test_two_deaths_change_nothing_but_rounding(runs: Runs, layout: Layout, row: str) -> None:
    runs.check(Case(layout, ROWS[row]))


PLACES = {
    "orphans": Case(hsdp.THREE, (Strike(0, 1, 3, "backward"), Strike(2, 0, 3, "forward")), 10),
    "restart": Case(hsdp.TWO, DEATH, 10, restarts=1),
    "spare": Case(hsdp.TWO, DEATH, 10, spares=1),
    "other position": Case(hsdp.THREE, (Strike(1, 1, 3, "backward"), Strike(2, 1, 3, "forward")), 10),
    "tensor and expert parallelism": Case(hsdp.TENSOR_EXPERTS, DEATH_OF_FOUR, 10, restarts=1),
    "outer, orphans": Case(
        hsdp.OUTER_THREE, (Strike(0, 1, 3, "backward"), Strike(2, 0, 3, "forward")), 10, flags=TWO_SHADOWS
    ),
    "outer, spare": Case(hsdp.OUTER_TWO, DEATH, 10, spares=1),
    "outer, restart in 16 bits": Case(hsdp.OUTER_SIXTEEN, DEATH, 10, restarts=1),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", some("hsdp places", list(PLACES), 3))
def test_who_takes_a_place_in_a_shard_group_gets_its_part_of_the_state(runs: Runs, tmp_path: Path, way: str) -> None:
    """And saves it: a worker that was in another position before, too."""
    saved = tmp_path / "checkpoints"
    case = PLACES[way].patient("5-:2").with_flags("--save", str(saved), "--save-interval", "8")
    check_as(runs, case, replicas=2)
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == str(case.iterations)


SAVED: list[tuple[Layout, Layout | None]] = [
    *((layout, None) for layout in (hsdp.TWO, hsdp.GRADIENTS, hsdp.OPTIMIZER, hsdp.OUTER_TWO, hsdp.OUTER_SIXTEEN)),
    *((layout, layout) for layout in (hsdp.OUTER_TWO, hsdp.OUTER_SIXTEEN)),
    (hsdp.TWO, hsdp.THREE),
    (hsdp.OUTER_THREE, hsdp.TWO),
    (hsdp.DOUBLE, None),
    (hsdp.HALF_MOMENTS, hsdp.HALF_MOMENTS),
    (hsdp.FOUR, replace(hsdp.TWO, samples=hsdp.FOUR.samples)),
]
"""Who saves, and who goes on with deaths of its own; None: Megatron alone."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "reader"), some("hsdp checkpoints", SAVED, 2), ids=lambda its: its.name if its else "megatron-alone"
)
def test_a_checkpoint_that_is_written_after_a_death_goes_on_as_the_failure_free_run_did(
    runs: Runs, tmp_path: Path, layout: Layout, reader: Layout | None
) -> None:
    folder = tmp_path / "checkpoints"
    case = Case(layout, DEATH, flags=("--save", str(folder), "--save-interval", "4"))
    check_as(runs, case)
    (folder / "latest_checkpointed_iteration.txt").write_text("4")
    if reader is None:
        its = hsdp.UNSHARDED.get(layout, layout)
        rows = runs.stock(Case(its), "--load", str(folder), script=STOCK).recorded
    else:
        strike = Strike(0, 0, 7, "update" if reader in hsdp.UNSHARDED else "backward")
        rows = runs(Case(reader, (strike,), flags=("--load", str(folder))), "again").steps
    check_rows(runs.reference(case).steps[4:], rows, hsdp.NEAR.get(layout, 1.0))


NEVER = 999
"""A visit that no iteration has: such a strike only says who will be struck, and how, by other means."""
INSIDE = [
    (layout, operation, kind)
    for layout in (hsdp.TWO, hsdp.TENSOR, hsdp.OUTER_TWO)
    for operation in ("all_gather_into_tensor", "reduce_scatter_tensor")
    for kind in ("stop", "kill")
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "operation", "kind"), some("hsdp inside", INSIDE, 1), ids=lambda its: getattr(its, "name", its)
)
def test_who_hangs_or_dies_in_an_operation_inside_its_shard_group_costs_the_group_alone(
    runs: Runs, layout: Layout, operation: str, kind: str
) -> None:
    strike = Strike(1, 1, 4, "forward", kind, visit=NEVER)
    case = Case(layout, (strike,)).altered("faulty.in_shard_group", strike.worker(layout), 4, operation, 3, kind)
    check_as(runs, case)


# ---- Megatron-FSDP 2, of Megatron main


@pytest.mark.slow
@second
@pytest.mark.parametrize("layout", hsdp.SECONDS, ids=lambda layout: layout.name)
def test_without_a_death_version_2_trains_as_plain_data_parallelism(runs: Runs, layout: Layout) -> None:
    near = hsdp.NEAR.get(layout, 1.0)
    if layout is hsdp.SECOND_EXPERTS:  # without clipping Megatron's own numbers are right, and has no norm
        runs.check_stock(Case(layout), near, script=STOCK)
        return
    plain = runs.stock(Case(replace(layout, flags=hsdp.plain(layout.flags))))
    check_rows(runs.reference(Case(layout)).steps, plain.recorded, near, str(layout))


@pytest.mark.slow
@second
@pytest.mark.parametrize("case", hsdp.drawn("version 2 faults", hsdp.SECONDS, PHASES_OF_SECOND, 6), ids=str)
def test_a_fault_in_a_shard_group_of_version_2_changes_nothing_but_rounding(runs: Runs, case: Case) -> None:
    check_as(runs, case)


SECOND_ROWS = {
    **{f"three, {name}": Case(hsdp.SECOND_THREE, strikes) for name, strikes in ROWS.items()},
    "orphans": Case(hsdp.SECOND_THREE, (Strike(0, 1, 3, "backward"), Strike(2, 0, 3, "forward")), 10),
    "restart": Case(hsdp.SECOND_TWO, DEATH, 10, restarts=1),
    "restart, 16 bits": Case(hsdp.SECOND_SIXTEEN, DEATH, 10, restarts=1),
    "restart, in the update": Case(hsdp.SECOND_CAST, (Strike(1, 1, 3, "optimizer"),), 10, restarts=1),
    "spare": Case(hsdp.SECOND_TWO, DEATH, 10, spares=1),
    "other position": Case(hsdp.SECOND_THREE, (Strike(1, 1, 3, "backward"), Strike(2, 1, 3, "forward")), 10),
    "native collective": Case(hsdp.SECOND_TWO, DEATH).over_nccl(),
    "recomputation": Case(hsdp.with_flags(hsdp.SECOND_TWO, "recompute", RECOMPUTE), DEATH),
    "multi-token prediction": Case(hsdp.with_flags(hsdp.SECOND_TWO, "mtp", MTP), DEATH),
    "norm of the parameters": Case(hsdp.with_flags(hsdp.SECOND_TWO, "norm", "--log-params-norm"), DEATH),
    "nothing to run": Case(hsdp.SECOND_TWO, (Strike(0, 1, 5, "backward"),)).altered("faulty.idle", 1),
    "hang": Case(hsdp.SECOND_TWO, (Strike(1, 1, 3, "backward", "stop"),)),
    "exception": Case(hsdp.SECOND_TWO, (Strike(1, 1, 3, "backward", "raise"),)),
}


@pytest.mark.slow
@second
@pytest.mark.parametrize("name", SECOND_ROWS)
def test_version_2_survives_what_version_1_does(runs: Runs, name: str) -> None:
    case = SECOND_ROWS[name]
    again = name.startswith(("orphans", "restart", "spare", "other position"))
    check_as(runs, case.patient("5-:2") if again else case, replicas=2 if again else None)


def flags(**changed: object) -> argparse.Namespace:
    plain = {
        "use_megatron_fsdp": True,
        "num_distributed_optimizer_instances": 2,
        "data_parallel_sharding_strategy": "optim_grads_params",
        "tensor_model_parallel_size": 1,
    }
    return argparse.Namespace(**(plain | changed))


def test_a_torch_whose_meshes_take_no_groups_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.10, with which all else works."""
    monkeypatch.delattr(fsdp_state.device_mesh, "_get_pg_from_name")
    with pytest.raises(UserError, match=r"--use-megatron-fsdp with --recover needs torch 2\.11 or later"):
        fsdp_state.install_meshes(lambda: False, ())


def test_what_a_model_that_is_built_once_more_computes_is_on_its_own_mesh() -> None:
    """Meshes of one shape are equal to torch, whatever groups they have."""

    def moments_are_on_the_mesh_of_their_parameter() -> bool:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        try:
            mesh = init_device_mesh("cpu", (2,))
            moments = torch.zeros_like(DTensor.from_local(torch.ones(3), mesh, [Shard(0)]))
            return bool(moments.device_mesh is mesh)
        finally:
            dist.destroy_process_group()

    fsdp_state.forget_meshes()
    assert moments_are_on_the_mesh_of_their_parameter()
    assert not moments_are_on_the_mesh_of_their_parameter(), "torch has changed: forget_meshes() may not be needed"
    fsdp_state.forget_meshes()
    assert moments_are_on_the_mesh_of_their_parameter()


def test_what_was_tried_with_megatron_fsdp_is_taken() -> None:
    assert cannot_shard_model(flags(), RecoverConfig(), 4) == []
    assert cannot_shard_model(flags(outer_dp_sharding_strategy="optim"), RecoverConfig(), 4) == []
    assert cannot_shard_model(flags(outer_dp_sharding_strategy="optim", log_params_norm=True), RecoverConfig(), 4) == []
    assert cannot_shard_model(flags(context_parallel_size=2), RecoverConfig(), 4) == []
    quantiles = flags(moe_router_load_balancing_type=["quantile_balancing"], fsdp_double_buffer=True)
    assert cannot_shard_model(quantiles, RecoverConfig(), 4) == []
    halves = flags(use_precision_aware_optimizer=True, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")
    assert cannot_shard_model(halves, RecoverConfig(), 4) == []
    assert cannot_shard_model(flags(num_experts=4, expert_model_parallel_size=2), RecoverConfig(), 8) == []
    sums = flags(megatron_fsdp_main_grads_dtype="bf16", megatron_fsdp_grad_comm_dtype="bf16")
    assert cannot_shard_model(sums, RecoverConfig(), 4) == []
    assert cannot_shard_model(argparse.Namespace(), RecoverConfig(), 4) == []
    assert cannot_shard_model(flags(megatron_fsdp_version=2), RecoverConfig(), 4) == []
    halves.megatron_fsdp_version = 2
    assert "by a norm of 0" in cannot_shard_model(halves, RecoverConfig(), 4)[0]
    experts = flags(megatron_fsdp_version=2, num_experts=4, expert_model_parallel_size=2)
    assert "--clip-grad 0" in cannot_shard_model(experts, RecoverConfig(), 8)[0]
    experts.clip_grad = 0.0
    assert cannot_shard_model(experts, RecoverConfig(), 8) == []
    experts.log_num_zeros_in_grad = True
    assert "--log-num-zeros-in-grad" in cannot_shard_model(experts, RecoverConfig(), 8)[0]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_padding_of_a_buffer_of_version_2_is_what_no_parameter_has(rank: int) -> None:
    from megatron.core.distributed.fsdp.src.megatron_fsdp.experimental.dbuffer import DBuffer
    from megatron.core.distributed.fsdp.src.megatron_fsdp.experimental.layout import GlobalLayout

    layout = GlobalLayout.build([torch.Size(shape) for shape in ((5, 6), (3, 4), (4,), (1, 6))], dp_size=2)
    size = layout.size // 2
    buffer = SimpleNamespace(layout=layout, offset=rank * size, local_buffer=torch.zeros(size))
    buffer._get_owned_range = partial(DBuffer._get_owned_range, buffer)
    for span in padding(buffer):
        assert span.start < span.stop
        buffer.local_buffer[span.start : span.stop] += 1
    for its in filter(None, map(buffer._get_owned_range, range(4))):
        buffer.local_buffer[its.buffer_relative_offset : its.buffer_relative_offset + its.numel] += 1
    assert buffer.local_buffer.tolist() == [1.0] * size


def test_of_a_group_of_version_2_that_was_told_to_be_complete_no_more_gradients_are_taken() -> None:
    """And what belongs to no parameter is zero then."""
    added: list[object] = []
    buckets = FsdpBuckets2.__new__(FsdpBuckets2)
    buckets._parts, buckets._padding = [((0, 2), torch.ones(4))], [[Span(2, 3)]]
    buckets._marks_last, buckets._unfinished = True, {0}
    buckets.gradients = Gradients(buckets._parts)
    reduce = buckets._inside_alone(0)(lambda partial, is_last: added.append((partial, is_last)))
    reduce("first", False)
    reduce("last")
    with pytest.raises(Disagreement, match="stops before the step is committed"):
        reduce("one more")
    assert added == [("first", False), ("last", False)]
    assert buckets._parts[0][1].tolist() == [1, 1, 0, 1]


def test_what_an_interrupted_pass_of_version_2_has_begun_comes_before_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[str] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(wait_stream=waited.append))
    context = SimpleNamespace(allgather_stream="all-gather", reduce_scatter_stream="reduce-scatter")
    version2.tidy(SimpleNamespace(module=SimpleNamespace(context=context, modules=list)))
    assert waited == ["all-gather", "reduce-scatter"]
    assert context.is_last_microbatch


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"num_distributed_optimizer_instances": 1}, "--num-distributed-optimizer-instances 2 or more"),
        ({"data_parallel_sharding_strategy": "no_shard"}, "plain data parallelism"),
        ({"outer_dp_sharding_strategy": "optim_grads"}, "use no_shard or optim"),
        ({"outer_dp_sharding_strategy": "optim", "data_parallel_sharding_strategy": "optim"}, "optim_grads_params"),
        ({"outer_dp_sharding_strategy": "optim", "megatron_fsdp_main_params_dtype": "auto"}, "main-params-dtype fp32"),
        ({"outer_dp_sharding_strategy": "optim", "async_save": True}, "--async-save"),
        (
            {"outer_dp_sharding_strategy": "optim", "use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16"},
            "bf16 types",
        ),
        ({"megatron_fsdp_grad_comm_dtype": "bf16"}, "--megatron-fsdp-grad-comm-dtype auto"),
        ({"pipeline_model_parallel_size": 2}, "--pipeline-model-parallel-size yet: with several shard groups"),
        ({"fp16": True}, "--fp16 yet: Megatron 0.19.2 itself fails in its first step"),
        ({"megatron_fsdp_version": 2, "save": "here"}, "--no-save-optim with --save"),
        ({"num_distributed_optimizer_instances": 3}, "does not divide the 4 data-parallel ranks"),
        ({"num_distributed_optimizer_instances": 4}, "shard groups of at least two workers"),
        ({"num_experts": 4, "expert_model_parallel_size": 2}, "lower --expert-model-parallel-size"),
    ],
)
def test_what_was_not_tried_is_refused_with_its_flag(changed: dict[str, object], said: str) -> None:
    found = cannot_shard_model(flags(**changed), RecoverConfig(), 4)
    assert len(found) == 1
    assert said in found[0]


# ---- --outer-dp-sharding-strategy optim


@pytest.mark.slow
@pytest.mark.parametrize("layout", some("outer parity", list(hsdp.UNSHARDED), 1), ids=lambda layout: layout.name)
def test_without_a_death_every_number_is_that_of_shard_groups_that_have_all_of_the_state(
    reference: Reference, layout: Layout
) -> None:
    check_steps(reference(Case(layout)), reference(Case(hsdp.UNSHARDED[layout])), 0.1 * hsdp.NEAR.get(layout, 1.0))


CELLS = hsdp.drawn("outer faults", list(hsdp.UNSHARDED), hsdp.ALL_PHASES, 1)
OUTER_ROWS = [
    Case(hsdp.OUTER_THREE, (Strike(0, 1, 2, "backward"), Strike(2, 1, 4, "param-gather"))),
    Case(hsdp.OUTER_THREE, (Strike(0, 1, 3, "forward"), Strike(2, 0, 4, "repartition")), flags=TWO_SHADOWS),
    Case(hsdp.OUTER_THREE, (Strike(1, 1, 3, "update", visit=2), Strike(2, 0, 3, "update")), flags=TWO_SHADOWS),
    Case(hsdp.OUTER_TWO, DEATH).over_nccl(),
    Case(hsdp.OUTER_TWO, (Strike(1, 1, 3, "param-gather"),), flags=("--recover-shadow-device", "cpu")),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CELLS, *some("outer rows", OUTER_ROWS, 1)], ids=str)
def test_a_fault_at_any_point_changes_nothing_but_rounding(runs: Runs, case: Case) -> None:
    check_as(runs, case)


@pytest.mark.slow
def test_when_the_last_copy_goes_the_run_ends_and_says_so(runs: Runs) -> None:
    case = Case(hsdp.OUTER_TWO, DEATH, 4, flags=("--recover-shadow-shards", "0"))
    result = runs(case)
    assert result.ended.codes == [EXIT_STATE_LOST, EXIT_STATE_LOST, EXIT_STATE_LOST, -9], result.told()
    assert "had no other copy" in result.log(0)


@pytest.mark.slow
def test_the_norm_of_parameters_that_are_spread_over_shard_groups_is_that_of_all(runs: Runs) -> None:
    layout = hsdp.OUTER_SIXTEEN
    case = Case(layout, DEATH, model=("--log-params-norm",))
    result = check_as(runs, case)
    expected = runs.reference(replace(case, layout=hsdp.UNSHARDED[layout]))
    ours, theirs = (console(its.out.glob("worker-*.log")) for its in (result, expected))
    assert len(ours["params norm"]) == case.iterations
    assert differences(ours, theirs, hsdp.NEAR[layout] * GRAD_NORM) == []
