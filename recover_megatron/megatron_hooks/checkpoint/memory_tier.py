"""Memory tier: snapshots of the state, kept in host memory of workers in other failure domains.

    boundary   every K iterations, and when the workers that keep copies change, all workers run the section "snapshot":
                   if all workers have received their parts of the last snapshot, that snapshot is complete, and K is
                   computed from its cost.  Then a snapshot begins: during the step `instep.state.snapshots` copies the
                   state to the host and sends it
    update     before it changes its state, each worker waits until the state is copied
    rollback   if the plan names a snapshot, each worker loads the snapshot of its position (`rejoin`)

The plan says which workers keep which copies (``Decision.copies``, computed by ``workload.snapshots``), so the workers
need no further agreement.

With a distributed optimizer each worker also sends, as a separate part, the pieces of the optimizer's state of which it
is the first live holder (``pieces``).  In a rollback each worker needs its shard and its shadows in the present layout.
It fetches all parts that contain elements of these, and copies the elements (``restored``).
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
from recover_megatron.instep.decision import CompleteSnapshot, Decision, Rollback, Taking
from recover_megatron.instep.faults import Spoiled
from recover_megatron.instep.manager import Manager
from recover_megatron.logger import get_logger
from recover_megatron.megatron_hooks.checkpoint.training_state import TrainingState
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
"""Seconds added to the hang timeout while a worker copies a state and waits for the previous snapshot."""


@dataclass(eq=False)
class MemoryTier:
    """Takes and loads the snapshots of one worker's present model.  Called by the worker's main thread."""

    _manager: Manager
    _state: TrainingState
    _sharded: ShardedOptimizer | None
    wanted: bool
    """True unless the user has turned the memory tier off."""
    every: int
    """Iterations between snapshots, as set by the user; 0 if the interval is computed from the cost of snapshots."""
    _taken: int = field(default=0, init=False)
    """The last epoch in which this worker began a snapshot, or found that a host lacked memory for it; 0 if none."""
    _short: bool = field(default=False, init=False)
    """True if any host lacked the memory for a snapshot in epoch ``_taken``; that epoch then has no snapshots."""
    _last: tuple[float, int] | None = field(default=None, init=False)
    """(``time.monotonic()`` at the end of the last snapshot section, state version then); None before the first one."""
    _met: float = field(default=0.0, init=False)
    """``time.monotonic()`` when all workers had entered the last snapshot section."""
    _cost: float = field(default=0.0, init=False)
    """Seconds after ``_met`` during which this worker's training has waited for the last snapshot."""
    _size: int = field(default=0, init=False)
    """Bytes of a snapshot's largest part, computed at the last check of the hosts' memory; 0 before a check."""
    _logged: bool = field(default=False, init=False)
    """True after this worker has checked the hosts' memory for snapshots, or has found that the tier is off."""

    def at_boundary(self) -> None:
        """Take a snapshot if one is due before the next step."""
        decision = self._manager.view.decision
        if not self._logged and not decision.copies:
            self._say_off(decision)
        if self._due(decision):
            self._manager.section("snapshot", self._take)
            self._cost = time.monotonic() - self._met

    def _due(self, decision: Decision) -> bool:
        """Return whether a snapshot is due; all workers get the same answer, even if some are in the next epoch."""
        view, version = self._manager.view, self._state.version
        if view.joining_next:
            return False
        if view.snapshots.wanted and view.in_section_of_others:
            return True
        if not decision.copies or version is None:
            return False
        missing = not decision.covered and self._taken < decision.epoch
        return missing or version % view.snapshots.interval == 0

    # ---- taking a snapshot

    def _take(self) -> None:
        """Complete the last snapshot and begin a new one, as the body of the section ``snapshot``.

        All workers run this section; after a loss the survivors repeat it from the start.
        """
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
            store.mark_complete()
            seconds = {"waited": round(cost, 6), "behind": round(behind, 6)}
            self._manager.log("snapshot", epoch=decision.epoch, after=store.newest, seconds=seconds)
            if not self.every and each > 0:
                store.interval = interval(cost, behind, each, _nodes(decision))
        if decision.copies and not (decision.leaving and self._sharded is not None):
            # A leaving worker still has shards, but the plan gives it no part.  Its shards move to other workers at the
            # next boundary; until then no snapshot is taken.
            own, others = self._own(decision), self._others(decision)
            if decision.epoch != self._taken:
                self._short = self._too_large(decision, own)
                self._taken = decision.epoch
            if not self._short:
                sharded = self._sharded is not None
                store.begin(Taking(decision.epoch, version, len(decision.copies), together=sharded), own, others)
        self._last = time.monotonic(), version

    def _own(self, decision: Decision) -> dict[int, Any]:
        """Return part -> tree: this worker's shards, and, if it keeps a copy of its position's state, that state."""
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
        """Return part -> (sending worker, address of its peer store), for the parts that this worker receives."""
        me, position = self._manager.view.worker, self._manager.view.position
        kept = {part: giver for part, (giver, keeper) in decision.copies.items() if keeper == me and part != position}
        return {part: (giver, decision.peer_stores[giver]) for part, giver in kept.items()}

    def before_update(self) -> None:
        """Wait until the state is copied for the snapshot.  Called before the optimizer's update changes the state."""
        began = time.monotonic()
        self._manager.view.snapshots.copied()
        self._cost += time.monotonic() - began

    def _most(self, *values: float) -> list[float]:
        view = self._manager.view
        return view.groups.most(values, tuple(sorted(view.live)))

    def _too_large(self, decision: Decision, own: Mapping[int, Any]) -> bool:
        """Return whether any host lacks the memory for a snapshot; log the tier's use of memory at the first check.

        Raises UserError if a host lacks the memory at the start of the run.
        """
        me, positions = self._manager.view.worker, self._manager.view.grid.size
        sizes = {part: sum(tensor.nbytes for tensor in flatten(tree)[1]) for part, tree in own.items()}
        states = max((size for part, size in sizes.items() if part < positions), default=0)
        shards = max((size for part, size in sizes.items() if part >= positions), default=0)
        if self._sharded is None:
            states += moments_of(self._state.without_moments())
        else:
            primaries = (fragment for _, own_pieces in self._sharded.primaries() for fragment in own_pieces)
            shards += moments_of(fragment.tensor for fragment in primaries if not fragment.state)
        states, shards = map(int, self._most(float(states), float(shards)))
        needs = dict.fromkeys(decision.workers, 0)
        for part, keepers in decision.copies.items():
            for worker in keepers:
                needs[worker] += needed(1, states if part < positions else shards)
        more = needs[me] - self._manager.view.snapshots.size
        free = available_memory()
        here = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
        (short,) = self._most(float(free is not None and more > free // here))
        if me == min(decision.workers) and (short or self._size == 0):
            self._say(max(needs.values()), bool(short))
        if short and self._state.version == self._state.first - 1 and decision.timeline == (0, 0):
            raise UserError(
                "--recover-memory-tier: a host lacks the memory for snapshots (see above); "
                "turn the tier off (--recover-memory-tier off), or start fewer workers per host"
            )
        self._logged, self._size = True, max(states, shards)
        return bool(short)

    def _say_off(self, decision: Decision) -> None:
        self._logged = True
        if self.wanted and _nodes(decision) > 1 and self._manager.view.worker == min(decision.workers):
            log.info("memory tier: off, as each part of the state has copies in several failure domains")

    def _say(self, size: int, short: bool) -> None:
        every = f"every {self._manager.view.snapshots.interval} iterations"
        first = "" if self.every else " (later at an interval computed from measured costs)"
        line = f"memory tier: snapshots {every}{first} need up to {size / 2**30:.3f} GiB of host memory per worker"
        log.info(line + ("; a host lacks this memory, so no snapshots are taken" if short else ""))

    # ---- rollback to a snapshot

    def load(self, target: Rollback) -> Callable[[], None]:
        """Load the snapshot of this worker's position into its training state.

        Call the returned function when all workers have loaded their snapshots.  Raises ``Spoiled`` if no worker has an
        intact copy, ``EpochRevoked`` if no worker with a copy can be reached.
        """
        view = self._manager.view
        position, kept = view.position, view.decision.kept
        assert position is not None
        if kept is None or kept.iteration != target.iteration:
            raise Spoiled("the workers that held the snapshot are lost")
        if self._sharded is not None:
            self._sharded.forget()
        tree = self._part(position, kept)
        self._state.load(tree)
        self._state.timeline = view.decision.timeline[0]
        if self._state.version != target.iteration:
            raise ValueError(f"the snapshot belongs to iteration {self._state.version}")
        if self._sharded is None:
            return lambda: None
        shards, workers = tree["own"]["shards"], tree["workers"]
        return restored(self._sharded, shards, workers, view.grid.size, lambda part: self._part(part, kept))

    def _part(self, part: int, kept: CompleteSnapshot) -> Any:
        view = self._manager.view
        groups = view.groups
        try:
            return view.snapshots.load(part, kept, groups.check)[0]
        except PeerLost as error:
            groups.end(PeerLost(f"a snapshot could not be fetched: {error}"))
            raise EpochRevoked(groups.number, str(error)) from error


def moments_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of Adam's two float32 moments of ``tensors``; other optimizers do not need more."""
    return sum(2 * 4 * tensor.numel() for tensor in tensors)


def _nodes(decision: Decision) -> int:
    """Return the number of nodes on which replicas of the plan run."""
    return len({name for names in decision.touched.values() for name in names if name.startswith("node ")})


def pieces(sharded: ShardedOptimizer) -> list[dict[str, Any]]:
    """Return, as live tensors, the pieces of the optimizer's state of which this worker is the first live holder.

    Call it only when the last update is finished (``ShardedOptimizer.complete``).
    """
    return [
        {"bucket": one.bucket, "start": one.start, "stop": one.stop, **one.give(one.start, one.stop)}
        for _, fragments in sharded.primaries()
        for one in fragments
    ]


def restored(
    sharded: ShardedOptimizer, saved: Any, workers: Sequence[int], positions: int, load: Callable[[int], Any]
) -> Callable[[], None]:
    """Rebuild this worker's fragments of the optimizer's state for the present layout, with the state of a snapshot.

    ``saved``: the result of ``Shards.to_json`` for this worker's columns when the snapshot was taken.  ``workers``: the
    workers that took the snapshot.  ``positions``: number of positions of a replica.  ``load``: function
    that maps the number of a part to a result of ``pieces``.  Call the returned function when all workers have rebuilt
    their fragments: see ``ShardedOptimizer.made_anew``.  Raises Disagreement if the snapshot lacks elements.
    """
    layouts, gone = sharded.shards.read(saved)

    def fill(held: list[list[ShardFragment]]) -> None:
        wanted = in_order(fragment for units in held for fragment in units)
        parts: dict[int, set[int]] = {}
        for bucket, fragments in wanted.items():
            column, numel = sharded.bucket(bucket)
            layout = layouts[column]
            live = frozenset(layout.workers) - gone
            elements = [(fragment.start, fragment.stop) for fragment in fragments]
            for unit in owned(layout, elements, numel):
                speaker = primary(layout, unit, live)
                if speaker is None:
                    raise Disagreement(f"no worker had the state of unit {unit} when the snapshot was taken")
                parts.setdefault(part_of(speaker, workers, positions), set()).add(bucket)
        left = {id(fragment): fragment.stop - fragment.start for own in wanted.values() for fragment in own}
        for part, buckets in sorted(parts.items()):
            for piece in load(part):
                if piece["bucket"] in buckets:
                    _take(piece, wanted, left)
        if any(left.values()):
            raise Disagreement(f"the snapshot lacks {sum(left.values())} elements of the optimizer's state")

    return sharded.made_anew(fill)


def _take(piece: dict[str, Any], wanted: InOrder, left: dict[int, int]) -> None:
    """Copy the elements of ``piece`` into the overlapping fragments of ``wanted``; deduct their number from ``left``.

    ``left``: id of a fragment -> number of its elements that are not loaded yet.
    """
    for fragment in overlapping(wanted, piece["bucket"], piece["start"], piece["stop"]):
        start, stop = max(piece["start"], fragment.start), min(piece["stop"], fragment.stop)
        fragment.take(start, stop, _cut(piece, slice(start - piece["start"], stop - piece["start"])))
        left[id(fragment)] -= stop - start


def _cut(piece: dict[str, Any], part: slice) -> dict[str, Any]:
    master = None if piece["master"] is None else piece["master"][part]
    return {"master": master, "state": part_of_state(piece["state"], part)}


PROC, CONTROL_GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def available_memory(proc: Path = PROC, cgroup: Path = CONTROL_GROUPS) -> int | None:
    """Return the bytes that the kernel and the control groups still let this process allocate; None if unknown."""
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
    """Return the bytes available in a control group; None if it has no limit or no folder."""
    for most, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        if (folder / most).exists() and (folder / used).exists():
            if (limit := (folder / most).read_text().strip()) == "max":
                return None
            return max(0, int(limit) - int((folder / used).read_text()) + _given_back(folder / "memory.stat"))
    return None


def _given_back(path: Path) -> int:
    """Return a control group's file cache in bytes, which counts as used but is dropped when memory is needed."""
    if not path.exists():
        return 0
    fields = (line.split() for line in path.read_text().splitlines())
    sizes = {name: int(value) for name, value in fields}
    return max(sum(sizes.get(f"{scope}{kind}_file", 0) for kind in ("inactive", "active")) for scope in ("total_", ""))
