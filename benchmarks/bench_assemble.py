"""Measure the time to plan new replicas from orphans of broken replicas, and the number of new replicas.

    python benchmarks/bench_assemble.py [--layouts 8x8 4x8] [--workers 1024 16384] [--per-node 8] [--dead 0.1]

The launch grid has Megatron's order: the workers of a tensor group are neighbours, and a stage of all replicas comes
before the next stage.  Random workers of the grid die at the same time.  The first call of `assemble` forms replicas
of orphans whose positions fit, and selects orphans that must change their positions.  The second call, after these
changes, forms more replicas.  Seconds are processor time.  Each number is the median of --repeat random draws.
"possible" is the number of replicas that the live workers of the nodes allow.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.megatron_runs import command_line, head, row, write
from recover_megatron.workload import Candidate, Placement, Shape, assemble


def launch(tp: int, pp: int, workers: int) -> tuple[Shape, list[list[int]]]:
    """Return (shape of a replica, grid); the grid lists each replica's workers by position."""
    replicas = workers // (tp * pp)
    shape = Shape(tp * pp, tuple(tuple(range(stage * tp, (stage + 1) * tp)) for stage in range(pp)))
    grid = [[(stage * replicas + r) * tp + t for stage in range(pp) for t in range(tp)] for r in range(replicas)]
    return shape, grid


def timed(*arguments: Any) -> tuple[float, Placement]:
    """Call `assemble`, which never blocks; return the seconds of processor time, and its result."""
    start = time.process_time()
    placement = assemble(*arguments)
    return time.process_time() - start, placement


def measure(tp: int, pp: int, workers: int, options: argparse.Namespace, seed: int) -> dict[str, float]:
    """Draw the dead workers once; return the seconds of both calls of `assemble`, and the replicas after each call."""
    shape, grid = launch(tp, pp, workers)
    dead = set(random.Random(seed).sample(range(workers), round(workers * options.dead)))
    whole = [r for r, members in enumerate(grid) if dead.isdisjoint(members)]
    candidates = {
        worker: Candidate(position, f"node{worker // options.per_node}")
        for r, members in enumerate(grid)
        for position, worker in enumerate(members)
        if not dead.isdisjoint(members) and worker not in dead
    }
    first_seconds, first = timed(whole, candidates, shape, len(grid))
    rest = {w: Candidate(first.rebuild.get(w, candidates[w].position), candidates[w].node) for w in first.spares}
    second_seconds, second = timed([*whole, *first.replicas], rest, shape, len(grid))
    live: dict[str, int] = {}
    for candidate in candidates.values():
        live[candidate.node] = live.get(candidate.node, 0) + 1
    return {
        "whole": len(whole),
        "formed at once": len(first.replicas),
        "changes of position": len(first.rebuild),
        "formed after them": len(second.replicas),
        "possible": len(whole) + sum(count // tp for count in live.values()) // pp,
        "first call, s": first_seconds,
        "second call, s": second_seconds,
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--layouts", nargs="+", default=["8x8", "4x8", "2x4", "1x16", "1x64"], help="TPxPP")
    parser.add_argument("--workers", nargs="+", type=int, default=[1024, 16384])
    parser.add_argument("--per-node", type=int, default=8)
    parser.add_argument("--dead", type=float, default=0.1, help="fraction of the workers that die")
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    rows = []
    for workers in options.workers:
        for layout in options.layouts:
            tp, pp = map(int, layout.split("x"))
            draws = [measure(tp, pp, workers, options, seed) for seed in range(options.repeat)]
            medians = {name: statistics.median(draw[name] for draw in draws) for name in draws[0]}
            rows.append({"workers": workers, "TP x PP": f"{tp} x {pp}", **medians})
    head(*(f"{name}:" for name in rows[0]))
    for cells in rows:
        row(*(f"{cell:.4f}" if name.endswith(", s") else cell for name, cell in cells.items()))
    write(options, rows)


if __name__ == "__main__":
    main()
