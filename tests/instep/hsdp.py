"""Layouts of Megatron-FSDP: shard groups of two workers or more, each of them a replica; and their table of faults.

A cell's place is a position; what a phase means is said in ``cells``.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.drawn import SEED, some
from tests.instep import runs
from tests.instep.cells import BEFORE_THE_COMMIT, PHASES, SHARDED_PHASES, WHEN, Cell, case_of
from tests.instep.runs import Case, Layout

ADAM = "--optimizer adam --lr 0.01 --min-lr 0.003 --adam-eps 1e-4 --disable-bias-linear"
FSDP = (
    "--use-megatron-fsdp --use-distributed-optimizer --ckpt-format fsdp_dtensor --overlap-grad-reduce "
    f"--no-gradient-reduce-div-fusion {ADAM}"
)
OUTER = "--outer-dp-sharding-strategy optim"
MIXED = "--bf16 --megatron-fsdp-main-grads-dtype fp32"


def hsdp(groups: int, strategy: str = "optim_grads_params", more: str = "") -> Layout:
    """``groups`` shard groups of two workers each."""
    flags = f"{FSDP} --data-parallel-sharding-strategy {strategy} --num-distributed-optimizer-instances {groups} {more}"
    return Layout(f"hsdp-{strategy}-{groups}{more}", groups, inner_ranks=2, flags=flags.strip())


def with_flags(layout: Layout, name: str, flags: str) -> Layout:
    return replace(layout, name=f"{layout.name}-{name}", flags=f"{layout.flags} {flags}")


def plain(flags: str) -> str:
    """The same without Megatron-FSDP 2."""
    ours = f"{SECOND.partition(ADAM)[2]} "
    before, _, after = flags.partition(ours)
    return " ".join([before, *after.split()[1:]])


TWO, THREE = hsdp(2), hsdp(3)
GRADIENTS, OPTIMIZER, OPTIMIZER_THREE = hsdp(2, "optim_grads"), hsdp(2, "optim"), hsdp(3, "optim")
TENSOR = replace(TWO, name="hsdp-tp2", tensor=2)
MOE = (
    "--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2"
)
EXPERTS = Layout("hsdp-ep2", 2, inner_ranks=4, samples=16, flags=f"{TWO.flags} {MOE}")
ASKED_FOR_ONE = Layout(
    "hsdp-asked-for-one", 2, inner_ranks=2,
    flags=f"{FSDP} --data-parallel-sharding-strategy optim_grads_params --fsdp-double-buffer --fp8-param-gather "
    "--megatron-fsdp-main-grads-dtype fp32 --megatron-fsdp-grad-comm-dtype fp32 --overlap-param-gather",
)  # fmt: skip
"""As in most of NVIDIA's configurations."""
BIASES = replace(
    EXPERTS, name="hsdp-biases",
    flags=f"{EXPERTS.flags.replace(' aux_loss', ' seq_aux_loss')} --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.02",
)  # fmt: skip
BESIDE = with_flags(
    EXPERTS, "beside", f"{MIXED} --overlap-moe-expert-parallel-comm --untie-embeddings-and-output-weights"
)
FOUR = Layout("hsdp-of-four", 2, inner_ranks=4, samples=16, flags=TWO.flags)
TENSOR_EXPERTS = Layout(
    "hsdp-tp2-ep2", 2, tensor=2, inner_ranks=2,
    flags=f"{EXPERTS.flags} --expert-tensor-parallel-size 1 --sequence-parallel",
)  # fmt: skip
CONTEXT = replace(TWO, name="hsdp-cp2", context=2, inner_ranks=1)
"""The context is split among the two workers of a shard group."""
CONTEXT_FOUR = replace(FOUR, name="hsdp-cp2-of-four", context=2, inner_ranks=2)
SIXTEEN_BITS = hsdp(2, more=MIXED)
HALF_MOMENTS = with_flags(SIXTEEN_BITS, "moments", runs.HALF_MOMENTS)
HALF = hsdp(2, more=f"--bf16 --megatron-fsdp-main-grads-dtype bf16 {runs.HALF_MOMENTS}")
DOUBLE = with_flags(TWO, "double", "--num-layers 4 --fsdp-double-buffer")
DOUBLE_MAX = with_flags(TWO, "double-max", "--num-layers 4 --megatron-fsdp-max-pool-double-buffer")
"""Four layers, two of which have memory at a time."""
QUANTILES = replace(
    EXPERTS, name="hsdp-quantiles",
    flags=EXPERTS.flags.replace("type aux_loss --moe-aux-loss-coeff 1e-2", "type quantile_balancing "
                                "--moe-aux-loss-coeff 0"),
)  # fmt: skip
OTHERS = [HALF_MOMENTS, HALF, DOUBLE, DOUBLE_MAX, QUANTILES]
"""Of what else is taken: whose numbers are those of Megatron alone, and are not seen elsewhere."""
NEAR = {SIXTEEN_BITS: 100.0, HALF_MOMENTS: 100.0, HALF: 1000.0}
"""A last bit of a parameter of 16 bits is more than one of 32."""
OUTER_TWO, OUTER_THREE = (with_flags(layout, "outer", OUTER) for layout in (TWO, THREE))
OUTER_TENSOR, OUTER_EXPERTS = (with_flags(layout, "outer", OUTER) for layout in (TENSOR, EXPERTS))
OUTER_CONTEXT = with_flags(CONTEXT, "outer", OUTER)
OUTER_SIXTEEN = with_flags(SIXTEEN_BITS, "outer", OUTER)
NEAR |= {OUTER_SIXTEEN: 100.0}
SECOND = (
    f"{ADAM} --use-megatron-fsdp --megatron-fsdp-version 2 --data-parallel-sharding-strategy optim_grads_params "
    "--ckpt-format fsdp_dtensor --num-distributed-optimizer-instances"
)
"""Of Megatron main."""
SECOND_TWO = Layout("hsdp2-2", 2, inner_ranks=2, flags=f"{SECOND} 2 --overlap-grad-reduce")
SECOND_THREE = Layout("hsdp2-3", 3, inner_ranks=2, flags=f"{SECOND} 3 --overlap-grad-reduce")
SECOND_SIXTEEN = with_flags(SECOND_TWO, "sixteen", MIXED)
SECOND_CAST = with_flags(SECOND_TWO, "cast", "--bf16")
"""Its gradients are in 16 bits, and the optimizer casts them."""
SECOND_AT_THE_END = replace(SECOND_TWO, name="hsdp2-at-the-end", flags=f"{SECOND} 2")
SECOND_EXPERTS = replace(
    EXPERTS, name="hsdp2-ep2", flags=f"{SECOND} 2 --overlap-grad-reduce --clip-grad 0 {MOE}"
)  # fmt: skip
NEAR |= {SECOND_SIXTEEN: 100.0, SECOND_CAST: 1000.0}
SECONDS = [SECOND_TWO, SECOND_THREE, SECOND_SIXTEEN, SECOND_CAST, SECOND_AT_THE_END, SECOND_EXPERTS]

HAS_SECOND = importlib.util.find_spec("megatron.core.optimizer.fully_sharded_optimizer") is not None
second = pytest.mark.skipif(not HAS_SECOND, reason="NOT TESTED: this Megatron has no --megatron-fsdp-version 2")

LAYOUTS = [TWO, THREE, GRADIENTS, OPTIMIZER, TENSOR, EXPERTS, CONTEXT, SIXTEEN_BITS]
UNSHARDED = {
    OUTER_TWO: TWO, OUTER_THREE: THREE, OUTER_TENSOR: TENSOR, OUTER_EXPERTS: EXPERTS, OUTER_CONTEXT: CONTEXT,
    OUTER_SIXTEEN: SIXTEEN_BITS,
}  # fmt: skip
"""Where the optimizer's state is spread over the shard groups -> the same where each has all of it."""
ITERATIONS = 8


def faults(layouts: Sequence[Layout], phases: Sequence[str]) -> list[Cell]:
    """The whole table: kills in each phase; of two groups hangs and exceptions, too, before the step is committed."""
    found = []
    for layout in layouts:
        for phase in phases:
            if phase == "recovery" and layout.replicas == 2:
                continue  # nobody would be left
            places = [place for place in range(layout.positions) if phase != "data" or place % layout.tensor == 0]
            found += [Cell(layout, phase, place, when, False) for place in places for when in WHEN]
            if phase in BEFORE_THE_COMMIT and layout in (TWO, OUTER_TWO):
                found += [
                    Cell(layout, phase, place, "later", False, kind) for place in places for kind in ("stop", "raise")
                ]
    return found


def drawn(family: str, layouts: Sequence[Layout], phases: Sequence[str], count: int) -> list[Case]:
    """``count`` cases of the table, or all of them."""
    found = []
    for cell in some(family, faults(layouts, phases), count):
        dropout = random.Random(f"dropout {cell} {SEED}").random() < 0.5
        most = 1 if cell.phase == "all-gather" and cell.layout in UNSHARDED else 0
        case = case_of(replace(cell, dropout=dropout), SEED, most, ITERATIONS)
        # Two shard groups break in one iteration: no part of a state may be in these alone.
        two = cell.phase == "recovery" and cell.layout in UNSHARDED
        found.append(case.with_flags("--recover-shadow-shards", "2") if two else case)
    return found


ALL_PHASES = (*PHASES, *SHARDED_PHASES)
