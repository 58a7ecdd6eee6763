"""What a scenario must end with, computed in one process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from recover_megatron.collectives.ledger import Ledger, Reduced, Span
from tests.collectives.crew import Outcome, Result, Scenario, gradient


def elements(spans: Iterable[Span | Reduced]) -> list[int]:
    return [element for span in spans for element in range(span.start, span.stop)]


def sum_of(workers: Sequence[int], bucket: int, scenario: Scenario) -> torch.Tensor:
    """The sum of the workers' gradients; exact with integers."""
    total = torch.zeros(scenario.sizes[bucket], dtype=torch.float64)
    for worker in workers:
        total += gradient(worker, bucket, scenario.sizes[bucket], scenario).double()
    return total.to(getattr(torch, scenario.dtype))


def in_order_of_the_ring(gradients: Sequence[torch.Tensor], chunks: Sequence[Sequence[Span]]) -> torch.Tensor:
    """sum of chunk c = (((g[c+1] + g[c+2]) + ...) + g[c]), each addition rounded to the type of the gradients."""
    result, size = torch.empty_like(gradients[0]), len(gradients)
    for owner, chunk in enumerate(chunks):
        for span in chunk:
            part = [g[span.start : span.stop] for g in gradients]
            total = part[(owner + 1) % size]
            for step in range(2, size + 1):
                total = total + part[(owner + step) % size]
            result[span.start : span.stop] = total
    return result


def check(scenario: Scenario, outcome: Outcome) -> None:
    """Every survivor holds, per segment, exactly what its ledger says, and nothing is lost."""
    dead = {fault.worker for fault in scenario.faults} & set(outcome.ended)
    assert {result.worker for result in outcome.results} == set(range(scenario.workers)) - dead
    for number in range(len(scenario.sizes)):
        numel = scenario.sizes[number]
        ledgers = {it.worker: Ledger(numel, (Reduced(*span) for span in it.reduced[number])) for it in outcome.results}
        for result in outcome.results:
            check_bucket(scenario, outcome, result, number, ledgers[result.worker])
        check_agreement(outcome, number)
        check_completeness(scenario, outcome, number, ledgers)
    for result in outcome.results:
        # The double's own, one way to each member and back.
        left_behind = 1 + 2 * scenario.workers if scenario.collective == "native" else 0
        before, after = result.descriptors
        assert after <= before + 1 + left_behind, f"descriptors leaked: {result.descriptors}"


def check_bucket(scenario: Scenario, outcome: Outcome, result: Result, number: int, ledger: Ledger) -> None:
    flat = result.buckets[number]
    for span in ledger.reduced:
        if scenario.op == "all_gather":
            wanted = gathered(scenario, number)
        elif scenario.rerun:
            wanted = sum_of(range(scenario.workers), number, scenario)
        else:
            wanted = sum_of(outcome.epochs[span.epoch], number, scenario)
        same = torch.equal(flat[span.start : span.stop], wanted[span.start : span.stop])
        assert same, f"worker {result.worker}, bucket {number}: {span} is not the sum that the ledger tells"
    own = sum_of(result.holds, number, scenario)
    for local in ledger.local:
        same = torch.equal(flat[local.start : local.stop], own[local.start : local.stop])
        assert same, f"worker {result.worker}, bucket {number}: {local} is LOCAL but not its own gradient"


def gathered(scenario: Scenario, number: int) -> torch.Tensor:
    """Each worker's shard of the first epoch."""
    numel, size = scenario.sizes[number], scenario.workers
    bounds = [rank * numel // size for rank in range(size + 1)]
    parts = [gradient(worker, number, numel, scenario)[bounds[worker] : bounds[worker + 1]] for worker in range(size)]
    return torch.cat(parts)


def check_agreement(outcome: Outcome, number: int) -> None:
    """What two survivors have REDUCED is the same to the last bit, from the same epoch."""
    first: dict[int, tuple[int, int]] = {}
    for result in outcome.results:
        bits = result.buckets[number].view(torch.uint8).view(-1, max(1, result.buckets[number].element_size()))
        for start, stop, epoch in result.reduced[number]:
            for element in range(start, stop):
                value = epoch, int.from_bytes(bytes(bits[element].tolist()), "little")
                assert first.setdefault(element, value) == value


def check_completeness(scenario: Scenario, outcome: Outcome, number: int, ledgers: dict[int, Ledger]) -> None:
    if scenario.op == "all_reduce":
        assert all(ledger.complete for ledger in ledgers.values())
    elif scenario.op == "reduce_scatter":
        members = outcome.epochs[max(outcome.epochs)]
        numel, size = scenario.sizes[number], len(members)
        for rank, worker in enumerate(members):
            shard = Span(rank * numel // size, (rank + 1) * numel // size)
            assert ledgers[worker].covers(shard), f"worker {worker} lacks a part of its shard {shard}"
    elif len(outcome.epochs) == 1:
        assert all(ledger.complete for ledger in ledgers.values())
    else:
        assert len(set(ledgers.values())) == 1, "after a pull all ledgers are equal"
        for worker, ledger in ledgers.items():  # an owner that lives has supplied its shard
            numel, size = scenario.sizes[number], scenario.workers
            assert ledger.covers(Span(worker * numel // size, (worker + 1) * numel // size))
