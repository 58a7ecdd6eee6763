"""The memory tier: snapshots of what the loss of one failure domain would take, in the memory of workers of others.

    boundary   every K iterations, and when other workers are to keep copies: a section, "snapshot"
                   all have what was begun last?  --> that one is complete; K from what it has cost
                   the step goes on; meanwhile `instep.state.snapshots` copies the state to the host, and does the rest
    update     not before all is copied
    rollback   the plan goes back to one: everybody loads its position's (`rejoin`)

The plan says who keeps what (``Decision.copies``, by ``workload.snapshots``), so nothing is asked.

With a distributed optimizer each worker gives the pieces for which it speaks, as a part of its own (``pieces``).  When
the run goes back each is to hold its shard and its shadows by the layout for who is there now: the parts in which these
elements were, by the layout of then, are fetched, and the elements taken (``restored``).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from recover_megatron.collectives.epoch import EpochRevoked, PeerLost
from recover_megatron.collectives.state.trees import flatten
from recover_megatron.errors import Disagreement, UserError
from recover_megatron.instep.decision import Decision, Kept, Rollback, Taking
from recover_megatron.instep.faults import Spoiled
from recover_megatron.instep.manager import Manager
from recover_megatron.logger import get_logger
from recover_megatron.megatron_hooks.checkpoint.state import TrainingState
from recover_megatron.megatron_hooks.optimizer.shard_fragments import (
    InOrder,
    ShardFragment,
    in_order,
    overlapping,
    part_of_state,
)
from recover_megatron.megatron_hooks.optimizer.sharded_optimizer import ShardedOptimizer
from recover_megatron.network.system import control_groups
from recover_megatron.workload.shards import owned, primary
from recover_megatron.workload.snapshots import interval, needed, part_of

log = get_logger(__name__)

SNAPSHOT_SECONDS = 600.0
"""What copying a state, and waiting for the one before, may take beyond the hang timeout."""


@dataclass(eq=False)
class MemoryTier:
    """The snapshots that one worker has a part in, with the model that it has; its main thread calls it."""

    _manager: Manager
    _state: TrainingState
    _sharded: ShardedOptimizer | None
    wanted: bool
    """Whether the user has not turned it off."""
    every: int
    """Iterations between snapshots as the user wants them; 0: by what they cost."""
    _taken: int = field(default=0, init=False)
    """The epoch in which one was to be begun last."""
    _short: bool = field(default=False, init=False)
    """Whether a host lacks the memory for it, in that epoch."""
    _last: tuple[float, int] | None = field(default=None, init=False)
    """When that was over, and after which iteration it was taken."""
    _met: float = field(default=0.0, init=False)
    """When all had come to it."""
    _cost: float = field(default=0.0, init=False)
    """Seconds that the training waited for it, from then on."""
    _size: int = field(default=0, init=False)
    """Bytes of the largest state, once it was said what the tier costs."""
    _told: bool = field(default=False, init=False)
    """Whether it was said what the tier costs, or why it is off."""

    def at_boundary(self) -> None:
        """Take a snapshot if one is due before the next step."""
        decision = self._manager.view.decision
        if not self._told and not decision.copies:
            self._say_off(decision)
        if self._due(decision):
            self._manager.section("snapshot", self._take)
            self._cost = time.monotonic() - self._met

    def _due(self, decision: Decision) -> bool:
        """The same answer on all workers at this boundary, though some of them may be an epoch ahead of others."""
        view, version = self._manager.view, self._state.version
        if view.joining_next:
            return False
        if view.snapshots.wanted and view.in_section_of_others:
            return True
        if not decision.copies or version is None:
            return False
        missing = not decision.covered and self._taken < decision.epoch
        return missing or version % view.snapshots.interval == 0

    # ---- a snapshot is taken

    def _take(self) -> None:
        """What all do in the section; again from the start, with whoever is left, if one is lost."""
        view, version = self._manager.view, self._state.version
        decision, groups, store = view.decision, view.groups, view.snapshots
        assert version is not None
        self._manager.mark("snapshot", waiting=True, allow=SNAPSHOT_SECONDS)
        came = time.monotonic()
        each = (came - self._last[0]) / (version - self._last[1]) if self._last and version > self._last[1] else 0.0
        whole, behind = store.finish(decision.epoch, groups.check)
        missing, cost, behind, each = self._most(float(not whole), self._cost, behind, each)
        self._met = time.monotonic()
        if not missing:
            store.settle()
            seconds = {"waited": round(cost, 6), "behind": round(behind, 6)}
            self._manager.log("snapshot", epoch=decision.epoch, after=store.newest, seconds=seconds)
            if not self.every and each > 0:
                store.interval = interval(cost, behind, each, _nodes(decision))
        if decision.copies and not (decision.leaving and self._sharded is not None):
            # Else who leaves has shards for which there is no part: they change hands at the next boundary.
            own, others = self._own(decision), self._others(decision)
            if decision.epoch != self._taken:
                self._short = self._too_large(decision, own)
                self._taken = decision.epoch
            if not self._short:
                sharded = self._sharded is not None
                store.begin(Taking(decision.epoch, version, len(decision.copies), together=sharded), own, others)
        self._last = time.monotonic(), version

    def _own(self, decision: Decision) -> dict[int, Any]:
        """The parts of which this worker has the state: its position's, if it is to keep that, and its shards."""
        me, position = self._manager.view.worker, self._manager.view.position
        assert position is not None
        found: dict[int, Any] = {}
        if self._sharded is not None:
            self._sharded.complete()
            found[part_of(me, decision.workers, self._manager.view.grid.size)] = pieces(self._sharded)
        if me in decision.copies[position]:
            found[position] = {**self._state.tree(), "workers": decision.workers}
        return dict(sorted(found.items()))

    def _others(self, decision: Decision) -> dict[int, tuple[int, str]]:
        """The parts that this worker is to keep and gets from others: who gives them, and where."""
        me, position = self._manager.view.worker, self._manager.view.position
        mine = {part: giver for part, (giver, keeper) in decision.copies.items() if keeper == me and part != position}
        return {part: (giver, decision.peer_stores[giver]) for part, giver in mine.items()}

    def before_update(self) -> None:
        """The state is about to change: not before it is copied."""
        began = time.monotonic()
        self._manager.view.snapshots.copied()
        self._cost += time.monotonic() - began

    def _most(self, *values: float) -> list[float]:
        view = self._manager.view
        return view.groups.most(values, tuple(sorted(view.live)))

    def _too_large(self, decision: Decision, own: Mapping[int, Any]) -> bool:
        """Whether the hosts lack the memory, or one does; and what the tier costs is said, once."""
        me, positions = self._manager.view.worker, self._manager.view.grid.size
        sizes = {part: sum(tensor.nbytes for tensor in flatten(tree)[1]) for part, tree in own.items()}
        states = max((size for part, size in sizes.items() if part < positions), default=0)
        shards = max((size for part, size in sizes.items() if part >= positions), default=0)
        if self._sharded is None:
            states += moments_of(self._state.without_moments())
        else:
            primaries = (fragment for _, its in self._sharded.primaries() for fragment in its)
            shards += moments_of(fragment.tensor for fragment in primaries if not fragment.state)
        states, shards = map(int, self._most(float(states), float(shards)))
        needs = dict.fromkeys(decision.workers, 0)
        for part, keepers in decision.copies.items():
            for worker in keepers:
                needs[worker] += needed(1, states if part < positions else shards)
        mine = needs[me] - self._manager.view.snapshots.size
        free = available_memory()
        here = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
        (short,) = self._most(float(free is not None and mine > free // here))
        if me == min(decision.workers) and (short or self._size == 0):
            self._say(max(needs.values()), bool(short))
        if short and self._state.version == self._state.first - 1 and decision.timeline == (0, 0):
            raise UserError(
                "--recover-memory-tier: the hosts do not have the memory for it (see above); "
                "turn it off (--recover-memory-tier off), or have fewer workers on a host"
            )
        self._told, self._size = True, max(states, shards)
        return bool(short)

    def _say_off(self, decision: Decision) -> None:
        self._told = True
        if self.wanted and _nodes(decision) > 1 and self._manager.view.worker == min(decision.workers):
            log.info("memory tier: off: no node or other domain has all that hold a part of the state")

    def _say(self, size: int, short: bool) -> None:
        every = f"every {self._manager.view.snapshots.interval} iterations"
        first = "" if self.every else " at first, then as often as measured costs say"
        told = f"memory tier: snapshots {every}{first}; up to {size / 2**30:.3f} GiB of host memory a worker"
        log.info(told + (", which a host does not have: none is taken" if short else ""))

    # ---- the run goes back to one

    def load(self, target: Rollback) -> Callable[[], None]:
        """Become what the snapshot of this worker's position says; to be called when all have done so.

        Raises ``Spoiled`` where nobody has it as it was taken, ``EpochRevoked`` where nobody can be reached.
        """
        view = self._manager.view
        position, kept = view.position, view.decision.kept
        assert position is not None
        if kept is None or kept.iteration != target.iteration:
            raise Spoiled("those who held it are lost")
        if self._sharded is not None:
            self._sharded.forget()
        tree = self._part(position, kept)
        self._state.load(tree)
        self._state.timeline = view.decision.timeline[0]
        if self._state.version != target.iteration:
            raise ValueError(f"it is of iteration {self._state.version}")
        if self._sharded is None:
            return lambda: None
        told, workers = tree["own"]["shards"], tree["workers"]
        return restored(self._sharded, told, workers, view.grid.size, lambda part: self._part(part, kept))

    def _part(self, part: int, kept: Kept) -> Any:
        view = self._manager.view
        groups = view.groups
        try:
            return view.snapshots.load(part, kept, groups.check)[0]
        except PeerLost as error:
            groups.end(PeerLost(f"a snapshot could not be had: {error}"))
            raise EpochRevoked(groups.number, str(error)) from error


def moments_of(tensors: Iterable[torch.Tensor]) -> int:
    """Count the bytes of the moments that Adam will have of these; other optimizers have no more."""
    return sum(2 * 4 * tensor.numel() for tensor in tensors)


def _nodes(decision: Decision) -> int:
    """On how many the replicas are."""
    return len({name for its in decision.touched.values() for name in its if name.startswith("node ")})


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
        wanted = in_order(fragment for its in held for fragment in its)
        parts: dict[int, set[int]] = {}
        for bucket, fragments in wanted.items():
            column, numel = sharded.bucket(bucket)
            layout = layouts[column]
            live = frozenset(layout.workers) - gone
            elements = [(fragment.start, fragment.stop) for fragment in fragments]
            for unit in owned(layout, elements, numel):
                speaker = primary(layout, unit, live)
                if speaker is None:
                    raise Disagreement(f"nobody had the state of unit {unit} when the snapshot was taken")
                parts.setdefault(part_of(speaker, workers, positions), set()).add(bucket)
        left = {id(fragment): fragment.stop - fragment.start for its in wanted.values() for fragment in its}
        for part, buckets in sorted(parts.items()):
            for its in load(part):
                if its["bucket"] in buckets:
                    _take(its, wanted, left)
        if any(left.values()):
            raise Disagreement(f"{sum(left.values())} elements of the optimizer's state are in no part of a snapshot")

    return sharded.made_anew(fill)


def _take(its: dict[str, Any], wanted: InOrder, left: dict[int, int]) -> None:
    """Give all that are ``wanted`` what a piece of a part has of them."""
    for fragment in overlapping(wanted, its["bucket"], its["start"], its["stop"]):
        start, stop = max(its["start"], fragment.start), min(its["stop"], fragment.stop)
        fragment.take(start, stop, _cut(its, slice(start - its["start"], stop - its["start"])))
        left[id(fragment)] -= stop - start


def _cut(its: dict[str, Any], part: slice) -> dict[str, Any]:
    master = None if its["master"] is None else its["master"][part]
    return {"master": master, "state": part_of_state(its["state"], part)}


PROC, CONTROL_GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def available_memory(proc: Path = PROC, cgroup: Path = CONTROL_GROUPS) -> int | None:
    """Bytes: what the kernel has to give, or a control group of this process may have, if less; None: not known."""
    groups = control_groups("memory", proc / "self" / "cgroup", cgroup)
    found = [size for size in (_of_kernel(proc / "meminfo"), *map(_of_group, groups)) if size is not None]
    return min(found, default=None)


def _of_kernel(path: Path) -> int | None:
    if not path.exists():
        return None
    for line in path.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return None


def _of_group(folder: Path) -> int | None:
    """None: it has no limit, or there is no such folder."""
    for most, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        if (folder / most).exists() and (folder / used).exists():
            if (limit := (folder / most).read_text().strip()) == "max":
                return None
            return max(0, int(limit) - int((folder / used).read_text()) + _given_back(folder / "memory.stat"))
    return None


def _given_back(path: Path) -> int:
    """Bytes of files that the kernel drops before it refuses memory: a run that reads its data fills its group so."""
    if not path.exists():
        return 0
    fields = (line.split() for line in path.read_text().splitlines())
    sizes = {name: int(value) for name, value in fields}
    return max(sum(sizes.get(f"{whose}{kind}_file", 0) for kind in ("inactive", "active")) for whose in ("total_", ""))
