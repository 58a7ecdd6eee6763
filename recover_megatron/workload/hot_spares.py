"""Hot spares: for which position a worker without a model should build one, before anybody is lost.

A hole is filled at the next boundary only by a worker that stands ready at its position.  So spares that nobody needs
now are shared out over the positions:

    alone    a worker that may stand in any replica: positions are as likely to be lost as they have workers elsewhere
             (with its own node it would be lost itself), and each spare that stands there already covers one of them
    teams    a tensor-parallel group lies in one node: as many whole teams as a node's spares make are spread over the
             groups, each in another node where there is one
    the rest of a node takes the place of one of its own workers: where most of them stand

    loss --assemble--> the spare stands in the new replica           (`placement`: it is ready, nothing is built)
                 '---> no spare of that position: one is rebuilt, as without this

A pure function; the same answer on every worker.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence

from recover_megatron.workload.placement import Candidate, Shape

Covered = Counter[tuple[int | None, str]]
"""(position, node) -> spares that stand there."""


def build_ahead(
    spares: Mapping[int, Candidate],
    replicas: Collection[Sequence[int]],
    nodes: Mapping[int, str],
    shape: Shape,
) -> dict[int, int]:
    """Worker -> the position that it should build its model for now; in the order of workers.

    ``spares``: all live workers without a place; those are told that are ready and have no model.  ``replicas``: the
    workers that have one, by position.  ``nodes``: where those run.
    """
    idle: dict[str, list[int]] = defaultdict(list)
    for worker, spare in sorted(spares.items()):
        if spare.ready and spare.position is None and not spare.fixed:
            idle[spare.node].append(worker)
    width = 1 if shape.cross_node else len(shape.tensor[0])
    groups = [(position,) for group in shape.tensor for position in group] if width == 1 else shape.tensor
    standing = {p: Counter(nodes[workers[p]] for workers in replicas) for group in groups for p in group}
    covered: Covered = Counter((spare.position, spare.node) for spare in spares.values() if spare.position is not None)
    found: dict[int, int] = {}
    for node, workers in sorted(idle.items()):
        while len(workers) >= width:
            team = min(groups, key=lambda group: (_cover(group, node, standing, covered), group))
            for position in team:
                found[workers.pop(0)] = position
                covered[position, node] += 1
        for worker in workers:
            here = [position for position in standing if standing[position][node]]
            if not here:
                break  # of no use to anybody, as long as the others of a team are missing
            best = min(here, key=lambda position: (covered[position, node] - standing[position][node], position))
            found[worker] = best
            covered[best, node] += 1
    return dict(sorted(found.items()))


def _cover(
    group: Sequence[int], node: str, standing: Mapping[int, Counter[str]], covered: Covered
) -> tuple[float, int]:
    """How well a group of positions is covered by spares against losses elsewhere than on ``node``, the least first.

    Of equally well covered ones the one with fewer spares on this node: they would be lost together.
    """
    at_risk = min(sum(standing[position].values()) - standing[position][node] for position in group)
    spares = min(sum(count for (p, _), count in covered.items() if p == position) for position in group)
    return (spares + 1) / (at_risk + 1e-3), sum(covered.get((position, node), 0) for position in group)
