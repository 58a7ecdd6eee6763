"""A distributed optimizer's state in snapshots in memory: each worker gives what it speaks for, piece by piece.

taken     worker 0: shard 0      worker 1: shard 1      worker 2: shard 2      a part of the snapshot each
a node is lost, others stand in its place, or nobody does
restored  each worker is to hold its shard and its shadows by the layout for who is there now (`workload.shards`):
          the parts in which these elements were, by the layout of then, are fetched, and the elements taken
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from recover_megatron.instep.faults import Disagreement
from recover_megatron.megatron_hooks.optimizer.shard_fragments import ShardFragment
from recover_megatron.megatron_hooks.optimizer.sharded_optimizer import ShardedOptimizer
from recover_megatron.workload.shards import owned, primary
from recover_megatron.workload.snapshots import part_of


def pieces(sharded: ShardedOptimizer) -> list[dict[str, Any]]:
    """The state for which this worker speaks, as a tree; its tensors are the living ones.

    The last update must be over (``ShardedOptimizer.complete``).
    """
    return [
        {"bucket": its.bucket, "start": its.start, "stop": its.stop, **its.give(its.start, its.stop)}
        for _, fragments in sharded.primaries()
        for its in fragments
    ]


def restored(
    sharded: ShardedOptimizer, told: Any, workers: Sequence[int], positions: int, load: Callable[[int], Any]
) -> Callable[[], None]:
    """Hold what those who are there now are to hold, as it was when a snapshot was taken.

    ``told``: what ``Shards.to_json`` said then to this worker's columns.  ``workers``: all that took it.  ``load``: the
    tree of a part, as ``pieces`` gave it.  The function is to be called when all have it: see
    ``ShardedOptimizer.made_anew``.
    """
    layouts, gone = sharded.shards.read(told)

    def fill(held: list[list[ShardFragment]]) -> None:
        wanted: dict[int, list[ShardFragment]] = {}
        for fragment in (fragment for its in held for fragment in its):
            wanted.setdefault(fragment.bucket, []).append(fragment)
        parts: dict[int, set[int]] = {}
        for bucket, fragments in wanted.items():
            column, numel = sharded.bucket(bucket)
            layout = layouts[column]
            live = frozenset(layout.workers) - gone
            elements = sorted((fragment.start, fragment.stop) for fragment in fragments)
            for unit in owned(layout, elements, numel):
                speaker = primary(layout, unit, live)
                if speaker is None:
                    raise Disagreement(f"nobody had the state of unit {unit} when the snapshot was taken")
                parts.setdefault(part_of(speaker, workers, positions), set()).add(bucket)
        left = {id(fragment): fragment.stop - fragment.start for its in wanted.values() for fragment in its}
        for part, buckets in sorted(parts.items()):
            for its in load(part):
                if its["bucket"] in buckets:
                    _take(its, wanted[its["bucket"]], left)
        if any(left.values()):
            raise Disagreement(f"{sum(left.values())} elements of the optimizer's state are in no part of a snapshot")

    return sharded.made_anew(fill)


def _take(its: dict[str, Any], fragments: Sequence[ShardFragment], left: dict[int, int]) -> None:
    """Give all of ``fragments`` what a piece of a part, in the same bucket, has of them."""
    for fragment in fragments:
        start, stop = max(its["start"], fragment.start), min(its["stop"], fragment.stop)
        if start < stop:
            fragment.take(start, stop, _cut(its, slice(start - its["start"], stop - its["start"])))
            left[id(fragment)] -= stop - start


def _cut(its: dict[str, Any], part: slice) -> dict[str, Any]:
    return {
        "master": None if its["master"] is None else its["master"][part],
        "state": {
            name: value[part] if isinstance(value, torch.Tensor) and value.dim() else value
            for name, value in its["state"].items()
        },
    }
