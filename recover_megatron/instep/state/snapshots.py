"""Snapshots in the host memory of one worker: of its own state, and of states of workers in other failure domains.

    begin(V)       start snapshot V; a thread copies the own state, computes check sums, offers the copy to another
                   worker, and fetches parts from other workers
    copied         wait until the memory passed to begin(V) may be written again
    finish         wait until all parts for this worker have arrived intact
    mark_complete  called when ``finish`` has returned on all workers: V is complete
    begin(V')      overwrite all snapshots except the newest complete one, V, which is kept until V' is complete
    join_status    report the parts to the epoch that this worker joins; abandon parts that have not arrived
    follow         adopt a plan, which says which snapshot is complete; after a rollback, drop invalid snapshots
    load           for a rollback: return a part from the own copy or from any holder; every chunk is checked

A snapshot part is the tree that a newcomer receives (`state_holder`), with a check sum for each chunk.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from recover_megatron.collectives.device import beside, made_so_far
from recover_megatron.collectives.epoch import PeerLost
from recover_megatron.collectives.state.holder import Offer, gpu_of
from recover_megatron.collectives.state.receiver import Receiver
from recover_megatron.collectives.state.trees import Place, flatten, new_memory
from recover_megatron.errors import Disagreement, InStepError
from recover_megatron.instep.decision import CompleteSnapshot, Decision, Snapshot, SnapshotName, Taking
from recover_megatron.instep.faults import Spoiled
from recover_megatron.instep.groups.epoch_groups import CommunicationConfig
from recover_megatron.instep.state.snapshot_parts import Copy, apart, checks_of, room, wrong_chunks
from recover_megatron.logger import get_logger

log = get_logger(__name__)

FAILED = "failed"
"""Key of an error text.  A worker that cannot take a snapshot part offers a tree with this key instead of the part."""
LOOK_SECONDS = 0.05
"""Seconds between two calls of ``stay`` while ``finish`` waits for parts."""


class Stopped(InStepError):
    """Raised in the background thread when the snapshot that it takes is not needed any more."""


@dataclass
class Held:
    """Complete part of a snapshot, held in this worker's memory."""

    part: int
    name: SnapshotName
    parts: int
    tree: dict[str, Any]
    """Tree with the keys "checks" (check sum of each chunk) and "state"."""
    offer: Offer

    @property
    def iteration(self) -> int:
        """The iteration after which the snapshot was taken."""
        return self.name[0]

    @property
    def size(self) -> int:
        """Bytes of the part's tensors."""
        return sum(tensor.nbytes for tensor in flatten(self.tree)[1])


@dataclass
class _Job:
    """State of the background work for one snapshot."""

    taking: Taking
    began: float = field(default_factory=time.monotonic)
    stopped: bool = False
    whole: bool = False
    seconds: float = 0.0
    copied: threading.Event = field(default_factory=threading.Event)
    """Set when the background thread does not read the training's memory any more."""
    over: threading.Event = field(default_factory=threading.Event)

    def stay(self) -> None:
        if self.stopped:
            raise Stopped("the epoch in which the snapshot was begun is over")


@dataclass(eq=False)
class SnapshotStore:
    """Snapshots that one worker holds.  Used by the main thread; a spare's thread calls ``join_status`` and
    ``follow``."""

    _comm_config: CommunicationConfig
    _inject: Callable[[str, int | None], None]
    """``Hooks.inject``, called before a snapshot is sent, and after all parts have arrived."""
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _held: list[Held] = field(default_factory=list, init=False)
    _sure: SnapshotName | None = field(default=None, init=False)
    """Name of the newest snapshot that is known to be complete; None: no snapshot is complete."""
    _of: int = field(default=0, init=False)
    """Epoch of the present timeline, to which all held snapshots belong."""
    _epoch: int = field(default=0, init=False)
    """Newest epoch of which this worker has a plan, or in which it has begun a snapshot."""
    _over: int = field(default=0, init=False)
    """Newest epoch that is over for this worker: no snapshot is taken in it or in earlier epochs."""
    _spoiled: set[tuple[int, int]] = field(default_factory=set, init=False)
    _job: _Job | None = field(default=None, init=False)
    _jobs: queue.SimpleQueue[Callable[[], None]] = field(default_factory=queue.SimpleQueue, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)
    interval: int = field(default=0, init=False)
    """Iterations between two snapshots, the same on all workers; 0: not decided yet."""
    wanted: bool = field(default=False, init=False)
    """True if any plan so far requires snapshots."""

    @property
    def size(self) -> int:
        """Bytes of all parts that this worker holds."""
        with self._lock:
            return sum(one.size for one in self._held)

    # ---- with the epochs

    def join_status(self) -> dict[str, Any]:
        """Return the snapshot fields of this worker's ``JoinStatus``; until the next plan, add no snapshot part."""
        with self._lock:
            self._over = self._epoch
            if self._job is not None:
                self._job.stopped = True
            job = self._job
        if job is not None:
            job.copied.wait()  # in the next epoch the caller may overwrite the memory that is being copied
        with self._lock:
            snapshots: tuple[Snapshot, ...] = tuple(
                (one.part, one.iteration, self._of, one.name[1], one.parts) for one in self._held
            )
            return {
                "snapshots": snapshots,
                "spoiled": tuple(sorted(self._spoiled)),
                "snapshot_interval": self.interval,
            }

    def follow(self, decision: Decision) -> None:
        """Adopt the plan of an epoch that this worker has joined; drop snapshots that a rollback made invalid."""
        kept, (epoch, last) = decision.kept, decision.timeline
        with self._lock:
            self._epoch = max(self._epoch, decision.epoch)
            if epoch != self._of:
                past = self._of == decision.before[0]
                self._drop(lambda one: not past or one.iteration > last)
                self._of = epoch
                for one in self._held:
                    self._give(one)
            self._sure = None if kept is None else (kept.iteration, kept.taken)
            self.interval = decision.snapshot_interval
            self.wanted = self.wanted or bool(decision.copies)

    def _drop(self, which: Callable[[Held], bool]) -> list[Held]:
        dropped = [one for one in self._held if which(one)]
        self._held = [one for one in self._held if not which(one)]
        for one in dropped:
            one.offer.withdraw()
        return dropped

    def _give(self, one: Held) -> None:
        """Offer the part ``one`` to workers that may load it for a rollback."""
        self._comm_config.offers.put(self._key(one.part, one.name), one.offer)

    def _key(self, part: int, name: SnapshotName) -> str:
        return f"snapshot/of/{self._of}/{name[0]}/{name[1]}/{part}"

    @property
    def newest(self) -> int | None:
        """Iteration of the newest snapshot that is known to be complete; None: no snapshot is complete."""
        with self._lock:
            return None if self._sure is None else self._sure[0]

    # ---- a snapshot is taken

    def begin(self, taking: Taking, own: Mapping[int, Any], others: Mapping[int, tuple[int, str]]) -> None:
        """Begin to take a snapshot; the caller must not write to the tensors of ``own`` before ``copied`` returns.

        No snapshot is taken if the epoch is over; the spare's thread may know that before the main thread.

        ``own``: part -> state, for parts that this worker copies from its own state: those that it sends, and those
        that it keeps for a sender with the same state.  ``others``: part -> (sender, address of the sender's peer
        store), for parts that this worker fetches.
        """
        self._stop()
        copies = {part: Copy(tree) for part, tree in own.items()}
        gpu = gpu_of(tensor for copy in copies.values() for tensor in copy.tensors)
        ready = functools.partial(beside, gpu, made_so_far(gpu))
        if self._thread is None:  # one thread for all snapshots, since ``start`` waits until the thread runs
            self._thread = threading.Thread(target=self._work, name="snapshot", daemon=True)
            self._thread.start()
        with self._lock:
            if taking.epoch <= self._over:
                return
            self._epoch = max(self._epoch, taking.epoch)
            dropped = self._drop(lambda one: one.name != self._sure)
            unused = {one.part: one.tree for one in dropped if one.part in own or one.part in others}
            there = {one.part for one in self._held if one.name == taking.name}
            job = self._job = _Job(taking)
        to_copy = {part: None if part in there else copy for part, copy in copies.items()}
        self._jobs.put(functools.partial(self._run, job, to_copy, ready, others, unused))

    def copied(self) -> None:
        """Wait until the background thread has read all memory passed to the last ``begin``.  Raises nothing."""
        if self._job is not None:
            self._job.copied.wait()

    def _stop(self) -> None:
        """Stop the background work; return when the thread writes to no memory any more."""
        with self._lock:
            if self._job is not None:
                self._job.stopped = True
        if self._job is not None:
            self._job.over.wait()

    def _work(self) -> None:
        while True:
            self._jobs.get()()

    def _run(
        self,
        job: _Job,
        to_copy: Mapping[int, Copy | None],
        ready: Callable[[Callable[[], None]], AbstractContextManager[None]],
        others: Mapping[int, tuple[int, str]],
        unused: dict[int, Any],
    ) -> None:
        try:
            self._give_own(job, to_copy, ready, unused)
            for part, (giver, address) in others.items():
                if self._held_of(job, part) is None:
                    tree, _ = self._fetch(giver, address, _on_its_way(job, part), room(unused.get(part)), job.stay)
                    if FAILED in tree:
                        raise Disagreement(f"worker {giver} failed to take its snapshot: {tree[FAILED]}")
                    if wrong := wrong_chunks(tree):
                        raise Disagreement(f"chunks {wrong} from worker {giver} do not match their check sums")
                    self._add(job, part, tree)
            job.seconds = time.monotonic() - job.began
            job.whole = True
            self._inject("snapshot", job.taking.iteration + 1)
        except Stopped:
            pass  # a new snapshot is taken after the next plan
        except Exception as error:  # noqa: BLE001  the thread must survive; the previous snapshot remains valid
            what = f"the snapshot after iteration {job.taking.iteration}"
            log.warning(f"{what} failed; the run keeps the previous snapshot: {type(error).__name__}: {error}")
        finally:
            job.copied.set()
            job.over.set()

    def _give_own(
        self,
        job: _Job,
        to_copy: Mapping[int, Copy | None],
        ready: Callable[[Callable[[], None]], AbstractContextManager[None]],
        unused: dict[int, Any],
    ) -> None:
        """Copy this worker's own parts, and offer them.  ``to_copy``: part -> copy to make; None if the part is already
        held."""
        given: set[int] = set()
        try:
            with ready(job.stay):
                copied = {
                    part: copy.make(room(unused.get(part, {}).get("state")), job.stay)
                    for part, copy in to_copy.items()
                    if copy is not None
                }
            job.copied.set()
            trees = {part: {"checks": checks_of(flatten(tree)[1]), "state": tree} for part, tree in copied.items()}
            if trees:
                self._inject("snapshot", job.taking.iteration + 1)
            for part in to_copy:
                one = self._add(job, part, trees[part]) if part in trees else self._held_of(job, part)
                assert one is not None
                self._comm_config.offers.put(_on_its_way(job, part), one.offer)
                given.add(part)
        except Stopped:
            raise
        except Exception as error:
            for part in set(to_copy) - given:  # otherwise another worker would wait for this part
                self._comm_config.offers.put(_on_its_way(job, part), Offer({FAILED: str(error)}))
            raise

    def _add(self, job: _Job, part: int, tree: dict[str, Any]) -> Held:
        one = Held(part, job.taking.name, job.taking.parts, tree, Offer(tree))
        with self._lock:
            job.stay()
            self._held.append(one)
            self._give(one)
        return one

    def _held_of(self, job: _Job, part: int) -> Held | None:
        with self._lock:
            job.stay()
            return next((one for one in self._held if (one.part, one.name) == (part, job.taking.name)), None)

    def finish(self, epoch: int, stay: Callable[[], None]) -> tuple[bool, float]:
        """Wait for the parts of the snapshot begun in ``epoch``.

        Returns (True if all parts have arrived, duration of the snapshot in seconds).

        ``stay``: function that is called every ``LOOK_SECONDS`` during the wait, and raises to stop the wait.
        """
        job = self._job
        if job is None or job.taking.epoch != epoch:
            return False, 0.0
        while not job.over.wait(LOOK_SECONDS):
            stay()
        return job.whole, job.seconds

    def mark_complete(self) -> None:
        """Mark the last begun snapshot as complete; call it after all workers have reported that ``finish``
        succeeded."""
        assert self._job is not None
        with self._lock:
            self._sure = self._job.taking.name

    # ---- a snapshot is loaded

    def load(self, part: int, kept: CompleteSnapshot, stay: Callable[[], None]) -> tuple[Any, int]:
        """Return the state of snapshot part ``part``, and the number of bytes received from other workers.

        If no holder has an intact copy, raises ``Spoiled`` if some copy is corrupted, else ``PeerLost`` or
        ``Disagreement``.  Also raises what ``stay`` raises.
        """
        errors: list[Exception] = []
        name = kept.iteration, kept.taken
        for one in self._held:
            if (one.part, one.name) == (part, name):
                if not (wrong := wrong_chunks(one.tree)):
                    return apart(one.tree["state"]), 0
                errors.append(self._bad(f"chunks {wrong} of the own copy", part, kept))
        for worker, address in kept.holders[part].items():
            if address == self._comm_config.peer_store.address:
                continue
            try:
                tree, size = self._fetch(worker, address, self._key(part, name), new_memory, stay)
                if not (wrong := wrong_chunks(tree)):
                    return tree["state"], size
                errors.append(self._bad(f"chunks {wrong} of worker {worker}'s copy", part, kept))
            except (PeerLost, Disagreement) as error:
                errors.append(error)
        if not any(isinstance(error, Spoiled) for error in errors):
            raise errors[-1] if errors else PeerLost("no live worker holds this part of the snapshot")
        with self._lock:
            self._spoiled.add((kept.iteration, self._of))
        raise Spoiled("; ".join(map(str, errors)))

    def _bad(self, what: str, part: int, kept: CompleteSnapshot) -> Spoiled:
        found = Spoiled(f"{what} of part {part} of the snapshot after iteration {kept.iteration} are corrupted")
        log.warning(str(found))
        return found

    def _fetch(
        self, worker: int, address: str, name: str, place: Place, stay: Callable[[], None]
    ) -> tuple[dict[str, Any], int]:
        source = self._comm_config.source(worker, address, name, stay)
        return Receiver([source], place, stay=stay, awaited=stay).fetch(lambda tree: 0)


def _on_its_way(job: _Job, part: int) -> str:
    return f"snapshot/{job.taking.epoch}/{job.taking.iteration}/{part}"
