"""The numbers of docs/experts.md are what the project's own functions say."""

from __future__ import annotations

import re

import pytest

from recover_megatron.launch.preflight import forecast
from recover_megatron.workload.domains import NodeLoss, data_parallel_ranks_per_replica
from recover_megatron.workload.snapshots import interval
from tests.harness import REPOSITORY

PAGE = (REPOSITORY / "docs" / "experts.md").read_text(encoding="utf-8")
PER_NODE = 8
ROWS = re.findall(r"(?m)^\| (\d+) \| T (\d+), P (\d+), EP (\d+)[^|]*\| (\d+) \| (\d+) \| ([^|]+) \| ([^|]+) \|$", PAGE)


def said(loss: NodeLoss) -> str:
    end = "back when replaced" if loss.waits else f"{loss.whole} go {'back' if loss.back else 'on'}"
    return f"{loss.broken} broken, {end}"


def test_the_page_has_its_table() -> None:
    assert len(ROWS) == 11


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}-nodes-t{row[1]}-p{row[2]}-ep{row[3]}")
def test_each_layout_costs_what_the_table_says(row: tuple[str, ...]) -> None:
    nodes, tensor, pipeline, expert, size, replicas = map(int, row[:6])
    inner = data_parallel_ranks_per_replica(tensor=tensor, context=1, expert=expert, expert_tensor=1)
    assert inner * tensor * pipeline == size
    assert size * replicas == nodes * PER_NODE
    assert row[6] == ("all" if replicas == 1 else f"1/{replicas}")
    sizes = {"tensor-model": tensor, "pipeline-model": pipeline, "expert-model": expert, "expert-tensor": 1}
    flags = [text for name, value in sizes.items() for text in (f"--{name}-parallel-size", str(value))]
    found = forecast("pretrain_gpt_recover.py", ["--recover", "--use-distributed-optimizer", *flags], nodes, PER_NODE)
    assert found is not None
    assert {said(loss) for loss in found.losses} == {row[7]}


def test_the_only_replica_loses_as_many_iterations_as_it_says() -> None:
    between = interval(cost=1.0, behind=0.0, iteration=10.0, domains=32)
    assert f"taken every {between} iterations" in PAGE
    assert f"{-(-between // 2)} are lost on average" in PAGE


@pytest.mark.parametrize(("ranks", "experts", "replicas", "told"), [(64, 4, 2, "6.3 %"), (8, 1, 2, "21 %")])
def test_the_gain_of_the_smallest_unit_is_by_the_formula(ranks: int, experts: int, replicas: int, told: str) -> None:
    lost = (1 - (1 - 1 / ranks) / (1 + 0.5 / experts)) / replicas
    (row,) = [line for line in PAGE.splitlines() if f"(I {ranks}, h {experts}, R {replicas})" in line]
    assert row.endswith(f"= {told} |")
    assert float(told.split()[0]) == pytest.approx(100 * lost, abs=0.5 if "." not in told else 0.06)
