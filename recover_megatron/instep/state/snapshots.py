"""The snapshots that one worker keeps in host memory: of its own state, and of positions that live in other domains.

    begin(V)   in a thread: the own state is copied, check sums, offered to who keeps it, too; others' are fetched
    copied     before anything is written to what begin(V) was given
    finish     all that this worker is to keep is there, as it was sent  --all have--> settle: V is complete
    begin(V')  what is older than the newest complete one is written over; V stays until V' is complete
    told       a worker that joins an epoch: what it holds; what is on its way then never arrives
    follow     the plan: which is complete among those who live; where the run goes back, which are still of its past
    load       a rollback: the own position's, from here or from whoever holds it; every chunk is checked

A snapshot is the tree that a newcomer gets (`state_holder`), with a check sum of each of its chunks.
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
from recover_megatron.instep.decision import Decision, Kept, Snapshot, SnapshotName, Taking
from recover_megatron.instep.faults import Spoiled
from recover_megatron.instep.groups.epoch_groups import CommunicationConfig
from recover_megatron.instep.state.snapshot_parts import Copy, apart, checks_of, room, wrong_chunks
from recover_megatron.logger import get_logger

log = get_logger(__name__)

FAILED = "failed"
"""What is given instead of a snapshot that could not be taken: the reason."""
LOOK_SECONDS = 0.05
"""How often somebody who waits for what is on its way asks whether the wait is to end."""


class Stopped(InStepError):
    """What was under way in the background is of no use any more."""


@dataclass
class Held:
    """A part of a snapshot that is here as a whole."""

    part: int
    name: SnapshotName
    parts: int
    tree: dict[str, Any]
    """"checks", and the "state"."""
    offer: Offer

    @property
    def iteration(self) -> int:
        """After which it was taken."""
        return self.name[0]

    @property
    def size(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for tensor in flatten(self.tree)[1])


@dataclass
class _Job:
    """What is done in the background for one snapshot."""

    taking: Taking
    began: float = field(default_factory=time.monotonic)
    stopped: bool = False
    whole: bool = False
    seconds: float = 0.0
    copied: threading.Event = field(default_factory=threading.Event)
    """Nothing of the training's memory is read any more."""
    over: threading.Event = field(default_factory=threading.Event)

    def stay(self) -> None:
        if self.stopped:
            raise Stopped("the epoch in which it was taken is over")


@dataclass(eq=False)
class SnapshotStore:
    """Of one worker.  The main thread calls it; ``told`` and ``follow`` that of a spare, too."""

    _comm_config: CommunicationConfig
    _inject: Callable[[str, int | None], None]
    """Told when a snapshot is about to be given, and when all have come: see ``Hooks.inject``."""
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _held: list[Held] = field(default_factory=list, init=False)
    _sure: SnapshotName | None = field(default=None, init=False)
    """The newest that is known to be complete."""
    _of: int = field(default=0, init=False)
    """The timeline's epoch: all that are held are of its past."""
    _epoch: int = field(default=0, init=False)
    """The newest that this worker has followed, or begun one in."""
    _over: int = field(default=0, init=False)
    """The newest of those that are over for it."""
    _spoiled: set[tuple[int, int]] = field(default_factory=set, init=False)
    _job: _Job | None = field(default=None, init=False)
    _jobs: queue.SimpleQueue[Callable[[], None]] = field(default_factory=queue.SimpleQueue, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)
    interval: int = field(default=0, init=False)
    """Iterations between two, as all have it; 0: nothing was decided yet."""
    wanted: bool = field(default=False, init=False)
    """Whether a plan of this run, the present one or one before, has had copies."""

    @property
    def size(self) -> int:
        """Bytes that are held."""
        with self._lock:
            return sum(one.size for one in self._held)

    # ---- with the epochs

    def told(self) -> dict[str, Any]:
        """What is joined with (fields of ``JoinStatus``): from now on nothing is added to it before the next plan."""
        with self._lock:
            self._over = self._epoch
            if self._job is not None:
                self._job.stopped = True
            job = self._job
        if job is not None:
            job.copied.wait()  # who has heard of another epoch may write to what was copied
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
        """The plan of an epoch that this worker has joined."""
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
        """Have whoever rolls back find it."""
        self._comm_config.offers.put(self._key(one.part, one.name), one.offer)

    def _key(self, part: int, name: SnapshotName) -> str:
        return f"snapshot/of/{self._of}/{name[0]}/{name[1]}/{part}"

    @property
    def newest(self) -> int | None:
        """The iteration of the newest snapshot that is known to be complete; None: there is none."""
        with self._lock:
            return None if self._sure is None else self._sure[0]

    # ---- one is taken

    def begin(self, taking: Taking, own: Mapping[int, Any], others: Mapping[int, tuple[int, str]]) -> None:
        """Take a snapshot; nothing of what is given here may be written to before ``copied`` returns.

        Nothing is taken in an epoch that is over: a spare's thread may have told so, of a worker that does not know.

        ``own``: the parts that this worker gives, or has as well as who gives them.  ``others``: part -> who gives it,
        and the address of its peer store.
        """
        self._stop()
        copies = {part: Copy(tree) for part, tree in own.items()}
        gpu = gpu_of(tensor for copy in copies.values() for tensor in copy.tensors)
        ready = functools.partial(beside, gpu, made_so_far(gpu))
        if self._thread is None:  # one for all: who starts a thread waits until it runs
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
        mine = {part: None if part in there else copy for part, copy in copies.items()}
        self._jobs.put(functools.partial(self._run, job, mine, ready, others, unused))

    def copied(self) -> None:
        """Return when the memory that the last snapshot was begun with is not read any more.  Raises nothing."""
        if self._job is not None:
            self._job.copied.wait()

    def _stop(self) -> None:
        """Nothing is written by the thread before any more."""
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
        mine: Mapping[int, Copy | None],
        ready: Callable[[Callable[[], None]], AbstractContextManager[None]],
        others: Mapping[int, tuple[int, str]],
        unused: dict[int, Any],
    ) -> None:
        try:
            self._give_own(job, mine, ready, unused)
            for part, (giver, address) in others.items():
                if self._held_of(job, part) is None:
                    tree, _ = self._fetch(giver, address, _on_its_way(job, part), room(unused.get(part)), job.stay)
                    if FAILED in tree:
                        raise Disagreement(f"worker {giver} has none: {tree[FAILED]}")
                    if wrong := wrong_chunks(tree):
                        raise Disagreement(f"chunks {wrong} of what worker {giver} gave are not what it had taken")
                    self._add(job, part, tree)
            job.seconds = time.monotonic() - job.began
            job.whole = True
            self._inject("snapshot", job.taking.iteration + 1)
        except Stopped:
            pass  # a plan follows, by which it is taken again
        except Exception as error:  # noqa: BLE001  the thread's boundary: the older one stands
            what = f"the snapshot after iteration {job.taking.iteration}"
            log.warning(f"{what} did not arrive: {type(error).__name__}: {error}")
        finally:
            job.copied.set()
            job.over.set()

    def _give_own(
        self,
        job: _Job,
        mine: Mapping[int, Copy | None],
        ready: Callable[[Callable[[], None]], AbstractContextManager[None]],
        unused: dict[int, Any],
    ) -> None:
        """``mine``: None for what is held already."""
        given: set[int] = set()
        try:
            with ready(job.stay):
                copied = {
                    part: copy.make(room(unused.get(part, {}).get("state")), job.stay)
                    for part, copy in mine.items()
                    if copy is not None
                }
            job.copied.set()
            trees = {part: {"checks": checks_of(flatten(its)[1]), "state": its} for part, its in copied.items()}
            if trees:
                self._inject("snapshot", job.taking.iteration + 1)
            for part in mine:
                one = self._add(job, part, trees[part]) if part in trees else self._held_of(job, part)
                assert one is not None
                self._comm_config.offers.put(_on_its_way(job, part), one.offer)
                given.add(part)
        except Stopped:
            raise
        except Exception as error:
            for part in set(mine) - given:  # nobody is to wait for it
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
        """Whether what was begun in this epoch has all arrived, when it has or will not; and in how many seconds.

        ``stay``: called meanwhile; raises to give up.
        """
        job = self._job
        if job is None or job.taking.epoch != epoch:
            return False, 0.0
        while not job.over.wait(LOOK_SECONDS):
            stay()
        return job.whole, job.seconds

    def settle(self) -> None:
        """All have said so of the one that was begun last: it is complete."""
        assert self._job is not None
        with self._lock:
            self._sure = self._job.taking.name

    # ---- one is needed

    def load(self, part: int, kept: Kept, stay: Callable[[], None]) -> tuple[Any, int]:
        """The state of a part, and the bytes that came from others.

        Raises ``Spoiled`` where no holder's is what was taken, ``PeerLost`` where none can be reached, and what
        ``stay`` raises.
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
            raise errors[-1] if errors else PeerLost("nobody holds it")
        with self._lock:
            self._spoiled.add((kept.iteration, self._of))
        raise Spoiled("; ".join(map(str, errors)))

    def _bad(self, what: str, part: int, kept: Kept) -> Spoiled:
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
