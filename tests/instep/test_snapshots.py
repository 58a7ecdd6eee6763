"""Snapshots in memory: complete everywhere or of no use; given, checked, found again after a rollback; and which."""

from __future__ import annotations

import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from recover_megatron.collectives.epoch import EpochRevoked
from recover_megatron.collectives.state.trees import flatten
from recover_megatron.instep.decision import MEMORY, CompleteSnapshot, Decision, JoinStatus, Rollback, Rules, Taking
from recover_megatron.instep.faults import Spoiled
from recover_megatron.instep.groups.epoch_groups import CommunicationConfig
from recover_megatron.instep.meeting.plan import decide
from recover_megatron.instep.meeting.timelines import covered, kept
from recover_megatron.instep.state.snapshot_parts import Copy, apart, checks_of, room
from recover_megatron.instep.state.snapshots import SnapshotStore
from recover_megatron.megatron_hooks.checkpoint.memory_tier import available_memory
from recover_megatron.network.peer_store import PeerStoreServer
from recover_megatron.workload.grid import launch_grid
from recover_megatron.workload.snapshots import FIRST_INTERVAL
from tests.harness.waiting import DEADLINE
from tests.instep.test_states import same

SECRET = b"what the workers of the test share"
STAGES = launch_grid(4, tensor=1, context=1, pipeline=2, inner_ranks=1)
"""Two replicas; workers 0 and 1 have position 0."""
NODES = ("a", "a", "b", "b")


@pytest.fixture(autouse=True)
def _deadline() -> Iterator[None]:
    """What hangs is ended."""
    signal.alarm(round(DEADLINE))
    yield
    signal.alarm(0)


# ---- which snapshot the run goes back to


def told(position: int, iteration: int, timeline: int) -> tuple[int, int, int, int, int]:
    """A part of a snapshot of two positions."""
    return position, iteration, timeline, 0, 2


def orphan(worker: int, position: int | None, *snapshots: tuple[int, ...], **fields: Any) -> JoinStatus:
    """One that the loss of iteration 7 has left."""
    told = {
        "ready": True, "iteration": 7, "version": 6, "at": 7, "snapshots": snapshots, "node": NODES[worker],
        "domains": (f"node {NODES[worker]}",), "peer_store": f"at {worker}",
    }  # fmt: skip
    return JoinStatus(None, position, **{**told, **fields})


LEFT = {0: orphan(0, 0, told(0, 4, 0), told(0, 6, 0)), 1: orphan(1, 1, told(1, 4, 0), told(1, 6, 0), version=None)}
"""Node b is lost; worker 1 has built the position that was lost with it."""


def decided(statuses: Mapping[int, JoinStatus], epoch: int = 5) -> Decision:
    return decide(epoch, statuses, STAGES, Rules(memory="auto"))


def test_the_run_goes_back_to_the_newest_snapshot_that_is_there_for_all_positions() -> None:
    decision = decided(LEFT)
    assert decision.rollback == Rollback(6, MEMORY, lost=0)
    assert (decision.iteration, decision.version, decision.timeline, decision.before) == (7, 6, (5, 6), (0, 0))
    assert decision.kept == CompleteSnapshot(6, {0: {0: "at 0"}, 1: {1: "at 1"}})
    half = {**LEFT, 1: replace(LEFT[1], snapshots=(told(1, 4, 0),))}
    assert decided(half).rollback == Rollback(4, MEMORY, lost=2), "the newer one was still on its way"
    assert decided({**LEFT, 1: replace(LEFT[1], snapshots=())}).state_lost


def test_one_that_nobody_could_load_is_not_tried_again() -> None:
    assert decided({**LEFT, 1: replace(LEFT[1], spoiled=((6, 0),))}).rollback == Rollback(4, MEMORY, lost=2)
    assert decided({**LEFT, 1: replace(LEFT[1], spoiled=((6, 3),))}).rollback == Rollback(6, MEMORY, lost=0)


def test_those_of_what_was_left_behind_do_not_count() -> None:
    """Worker 1 has missed that the run went back in epoch 3."""
    now = {"timeline": (3, 4), "state_of": 3}
    renamed = replace(LEFT[0], snapshots=(told(0, 4, 3),), **now)
    assert decided({0: renamed, 1: LEFT[1]}).state_lost
    both = {0: renamed, 1: replace(LEFT[1], snapshots=(told(1, 4, 3),), **now)}
    assert decided(both).rollback == Rollback(4, MEMORY, lost=2)


def test_the_newer_one_of_memory_and_disk_is_taken() -> None:
    def with_checkpoint(iteration: int) -> Mapping[int, JoinStatus]:
        return {worker: replace(one, checkpoints=((iteration, "save"),)) for worker, one in LEFT.items()}

    assert decided(with_checkpoint(5)).rollback == Rollback(6, MEMORY, lost=0)
    assert decided(with_checkpoint(6)).rollback == Rollback(6, MEMORY, lost=0), "nothing is to be read"
    assert decided({w: replace(s, iteration=9, checkpoints=((7, "save"),)) for w, s in LEFT.items()}).rollback == (
        Rollback(7, "save", lost=1)
    )
    nothing = {worker: replace(one, snapshots=()) for worker, one in with_checkpoint(4).items()}
    assert decided(nothing).rollback == Rollback(4, "save", lost=2)


def whole(worker: int, **fields: Any) -> JoinStatus:
    replica, position = STAGES.place(worker)
    return replace(orphan(worker, position), replica=replica, ready=False, **fields)


def test_the_plan_says_who_keeps_what_and_whether_it_is_there() -> None:
    statuses = {worker: whole(worker, snapshot_interval=worker) for worker in range(4)}
    decision = decided(statuses)
    assert (decision.copies, decision.kept, decision.covered) == ({0: (0, 2), 1: (3, 1)}, None, False)
    assert decision.snapshot_interval == 3, "somebody has missed the last time that it was chosen"
    assert decide(5, statuses, STAGES, Rules(memory="auto", memory_interval=8)).snapshot_interval == 8
    assert (
        decided({w: replace(s, snapshot_interval=0) for w, s in statuses.items()}).snapshot_interval == FIRST_INTERVAL
    )
    holders = {0: told(0, 6, 0), 1: told(1, 6, 0), 2: told(0, 6, 0), 3: told(1, 6, 0)}
    there = {worker: replace(statuses[worker], snapshots=(held,)) for worker, held in holders.items()}
    assert decided(there).covered
    assert not decided({**there, 2: statuses[2]}).covered, "it is complete, and not where it is wanted"
    assert decided({**there, 2: statuses[2]}).kept is not None
    assert decide(5, statuses, STAGES, Rules()).copies == {}


def test_complete_means_every_position() -> None:
    one = {0: replace(whole(0), snapshots=(told(0, 2, 0), told(1, 2, 0), told(0, 4, 0)))}
    assert kept(one, (0, 0)) == CompleteSnapshot(2, {0: {0: "at 0"}, 1: {0: "at 0"}})
    assert covered(None, {})
    assert not covered(None, {0: (0, 1)})


def test_shards_that_were_cut_for_others_do_not_complete_a_snapshot() -> None:
    """Taken after iteration 4 in epoch 1 by three workers, and once more in epoch 5 by the two that are left."""
    held = {0: [(0, 4, 0, 1, 4), (1, 4, 0, 1, 4), (0, 4, 0, 5, 3)], 1: [(3, 4, 0, 1, 4), (1, 4, 0, 5, 3)]}
    both = {worker: replace(whole(worker), snapshots=tuple(its)) for worker, its in held.items()}
    assert kept(both, (0, 0)) is None, "the part of worker 1 of epoch 1 is nowhere, nor is one of epoch 5"
    third = {**both, 2: replace(whole(2), snapshots=((2, 4, 0, 1, 4),))}
    found = kept(third, (0, 0))
    assert (found and found.taken, found and set(found.holders)) == (1, {0, 1, 2, 3})
    assert not covered(found, {0: (0, 1), 1: (0, 1), 2: (0, 1)}), "other parts than are wanted now"
    newest = {**third, 3: replace(whole(3), snapshots=((2, 4, 0, 5, 3),))}
    assert kept(newest, (0, 0)) == CompleteSnapshot(4, {0: {0: "at 0"}, 1: {1: "at 1"}, 2: {3: "at 3"}}, 5)


def test_parts_that_belong_together_are_named_by_their_epoch() -> None:
    """The same iteration once more, in another epoch: what is held of the first does not stand for it."""
    worker = Worker()
    for epoch in (1, 2):
        worker.store.begin(Taking(epoch, 4, 1, together=True), {0: state_at(4, epoch)}, {})
        assert worker.store.finish(epoch, _nothing)[0]
        worker.store.mark_complete()
    assert worker.store.join_status()["snapshots"] == ((0, 4, 0, 1, 1), (0, 4, 0, 2, 1))
    state, _ = worker.store.load(0, CompleteSnapshot(4, {0: {0: worker.address}}, 2), _nothing)
    assert same(state, state_at(4, 2))


def test_where_shards_are_spread_each_worker_has_a_part_and_what_breaks_all_their_holders_is_covered() -> None:
    statuses = {worker: whole(worker) for worker in range(4)}
    spread = Rules(memory="auto", spread=True, holders=2)
    wanted = decide(5, statuses, STAGES, spread).copies
    assert set(wanted) == {0, 1, 2, 3, 4, 5}
    assert all({NODES[giver], NODES[keeper]} == {"a", "b"} for giver, keeper in wanted.values())
    assert [wanted[2 + worker][0] for worker in range(4)] == [0, 1, 2, 3]


# ---- snapshots that are taken


def state_at(iteration: int, position: int) -> dict[str, Any]:
    base = torch.arange(3000.0) + 10_000 * iteration + 100_000 * position
    return {
        "column": {"parameters": [base, torch.tensor(float(iteration))]},
        "own": {"rate": 0.1, "version": iteration},
    }


class Worker:
    """A store, and what it was told of."""

    def __init__(self) -> None:
        self.config = CommunicationConfig(PeerStoreServer("127.0.0.1", SECRET), SECRET, torch.device("cpu"))
        self.reached: list[tuple[str, int | None]] = []
        self.store = SnapshotStore(self.config, self._reached)
        self.at: Callable[[], None] = _nothing

    def _reached(self, phase: str, iteration: int | None) -> None:
        self.reached.append((phase, iteration))
        self.at()

    def take(self, iteration: int, *positions: int, epoch: int = 1, settled: bool = True) -> None:
        """A snapshot of these positions, by this worker alone; ``settled``: it knows that it is complete."""
        self.begin(iteration, *positions, epoch=epoch)
        assert self.store.finish(epoch, _nothing)[0]
        if settled:
            self.store.mark_complete()

    def begin(self, iteration: int, *positions: int, epoch: int = 1) -> None:
        states = {position: state_at(iteration, position) for position in positions}
        self.store.begin(Taking(epoch, iteration, len(positions)), states, {})

    @property
    def address(self) -> str:
        return self.config.peer_store.address

    def held(self) -> list[tuple[int, int, int]]:
        return sorted(one[:3] for one in self.store.join_status()["snapshots"])


def _nothing() -> None:
    pass


def pair() -> tuple[Worker, Worker]:
    return Worker(), Worker()


def begin(workers: tuple[Worker, Worker], iteration: int, epoch: int = 1) -> None:
    """Each gives its own position, 0 and 1, and is to keep the other."""
    first, second = workers
    first.store.begin(Taking(epoch, iteration, 2), {0: state_at(iteration, 0)}, {1: (1, second.address)})
    second.store.begin(Taking(epoch, iteration, 2), {1: state_at(iteration, 1)}, {0: (0, first.address)})


def take(workers: tuple[Worker, Worker], iteration: int, epoch: int = 1) -> list[bool]:
    """Whether each has all."""
    begin(workers, iteration, epoch)
    return [worker.store.finish(epoch, _nothing)[0] for worker in workers]


def complete(workers: tuple[Worker, Worker], iteration: int) -> None:
    assert take(workers, iteration) == [True, True]
    for worker in workers:
        worker.store.mark_complete()


def of_both(workers: tuple[Worker, Worker], iteration: int, without: Worker | None = None) -> CompleteSnapshot:
    holders = {n: worker.address for n, worker in enumerate(workers) if worker is not without}
    return CompleteSnapshot(iteration, {0: holders, 1: holders})


def test_each_has_its_own_and_the_others_and_two_versions() -> None:
    workers = pair()
    for iteration in (0, 2, 4):
        complete(workers, iteration)
        assert workers[0].reached[-1] == ("snapshot", iteration + 1)
    assert workers[0].held() == workers[1].held() == [(0, 2, 0), (0, 4, 0), (1, 2, 0), (1, 4, 0)]
    for position in (0, 1):
        state, came = workers[0].store.load(position, of_both(workers, 4), _nothing)
        assert (same(state, state_at(4, position)), came) == (True, 0)


def test_nobody_writes_to_a_state_before_it_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither who makes an update, nor who has heard of another epoch."""
    make, gate = Copy.make, threading.Event()

    def gated(self: Copy, *args: Any) -> Any:
        gate.wait()
        return make(self, *args)

    monkeypatch.setattr(Copy, "make", gated)
    for told in (False, True):
        worker, state = Worker(), state_at(2, 0)
        gate.clear()
        worker.store.begin(Taking(1, 2, 1), {0: state}, {})

        def write(worker: Worker = worker, state: Any = state, told: bool = told) -> None:
            worker.store.join_status() if told else worker.store.copied()
            state["column"]["parameters"][0].zero_()

        writer = threading.Thread(target=write, daemon=True)
        writer.start()
        writer.join(0.2)
        assert writer.is_alive()
        gate.set()
        writer.join()
        if not told:  # else it is of no use any more
            assert worker.store.finish(1, _nothing)[0]
            (held,) = worker.store._held
            assert same(held.tree["state"], state_at(2, 0))


def test_memory_is_used_again() -> None:
    workers = pair()
    complete(workers, 0)
    before = {tensor.data_ptr() for one in workers[0].store._held for tensor in flatten(one.tree)[1]}
    size = workers[0].store.size
    complete(workers, 2)
    complete(workers, 4)
    after = {tensor.data_ptr() for one in workers[0].store._held for tensor in flatten(one.tree)[1]}
    assert before <= after
    assert workers[0].store.size == 2 * size


def test_no_process_that_is_forked_has_the_memory_of_a_snapshot() -> None:
    (tensor,) = Copy([torch.ones(1 << 16)]).make(room(None), _nothing)
    flags: list[str] = []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and ":" not in first:
            start, stop = (int(end, 16) for end in first.split("-"))
        elif first == "VmFlags:" and start <= tensor.data_ptr() < stop:
            flags += rest
    assert "dc" in flags  # as proc(5) names "do not copy area on fork"


def test_memory_that_no_part_is_written_to_again_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a loss other workers keep other parts: what was held of the old ones does not stay beside two new ones."""
    worker, make, gate, reached = Worker(), Copy.make, threading.Event(), threading.Event()
    for iteration in (0, 2):
        worker.take(iteration, 0, 1)
    (older,) = (weakref.ref(one.tree["state"]["column"]["parameters"][0])
                for one in worker.store._held if (one.part, one.iteration) == (1, 0))  # fmt: skip

    def gated(self: Copy, *args: Any) -> Any:
        reached.set()
        gate.wait()
        return make(self, *args)

    monkeypatch.setattr(Copy, "make", gated)
    worker.store.begin(Taking(1, 4, 2), {0: state_at(4, 0)}, {})
    assert reached.wait(DEADLINE)
    assert older() is None
    gate.set()
    assert worker.store.finish(1, _nothing)[0]


def test_nothing_is_begun_in_an_epoch_that_is_over() -> None:
    """A worker's replica is broken: its spare's thread has told what is held, while its main thread was about to begin
    one more.  What was told of must be there when the plan counts on it, and nothing else is."""
    worker = Worker()
    worker.take(0, 0)
    worker.take(2, 0, settled=False)
    told = worker.held()
    assert told == [(0, 0, 0), (0, 2, 0)], "of the newer one this worker does not know whether it is complete"
    worker.begin(4, 0)
    assert worker.held() == told
    worker.store.follow(Decision(2, {}, (), kept=CompleteSnapshot(2, {})))
    worker.begin(4, 0)
    assert [one.iteration for one in worker.store._held] == [0, 2]
    worker.take(4, 0, epoch=2, settled=False)
    assert worker.held() == [(0, 2, 0), (0, 4, 0)]


def test_the_older_one_stands_while_a_newer_one_is_on_its_way() -> None:
    workers = first, second = pair()
    complete(workers, 0)
    complete(workers, 2)
    gate = threading.Event()
    second.at = gate.wait  # it has copied its state, and does not give it
    begin(workers, 4)
    assert (1, 2, 0) in first.held()
    assert (1, 4, 0) not in first.held()
    gate.set()
    whole, _ = first.store.finish(1, _nothing)
    assert not whole, "a worker has joined an epoch: nothing comes after that"
    assert (1, 4, 0) not in first.held()
    assert first.store.finish(2, _nothing) == (False, 0.0), "it was begun in another epoch"
    state, _ = first.store.load(1, of_both(workers, 2), _nothing)
    assert same(state, state_at(2, 1))
    first.store.follow(Decision(2, {}, (), kept=CompleteSnapshot(2, {})))
    second.at = _nothing
    second.store.follow(Decision(2, {}, (), kept=CompleteSnapshot(2, {})))
    assert take(workers, 4, epoch=2) == [True, True]


def test_a_changed_byte_is_found_and_another_copy_is_taken() -> None:
    workers = first, second = pair()
    complete(workers, 2)
    spoil(first, 0)
    state, came = first.store.load(0, of_both(workers, 2), _nothing)
    assert same(state, state_at(2, 0))
    assert came > 0
    spoil(second, 0)
    with pytest.raises(Spoiled, match=r"chunks \[0\] of the own copy of part 0 of the snapshot after iteration 2"):
        first.store.load(0, of_both(workers, 2), _nothing)
    assert first.store.join_status()["spoiled"] == ((2, 0),)


def spoil(worker: Worker, position: int) -> None:
    (one,) = (one for one in worker.store._held if one.part == position)
    one.tree["state"]["column"]["parameters"][0].view(torch.uint8)[17] ^= 1


def test_what_could_not_be_copied_leaves_nobody_waiting() -> None:
    workers = first, second = pair()
    complete(workers, 0)

    def fails() -> None:
        raise MemoryError("no room")

    second.at = fails
    assert take(workers, 2) == [False, False]
    assert (1, 0, 0) in first.held()


def test_nobody_is_waited_for_beyond_the_end_of_the_epoch() -> None:
    first, second = pair()
    first.store.begin(Taking(1, 2, 2), {0: state_at(2, 0)}, {1: (1, second.address)})

    def over() -> None:
        raise EpochRevoked(1, "a worker died")

    with pytest.raises(EpochRevoked):
        first.store.finish(1, over)
    first.store.join_status()
    first.store.begin(Taking(2, 2, 2), {0: state_at(2, 0)}, {})
    assert first.store.finish(2, _nothing)[0]


def test_after_a_rollback_those_of_the_common_past_are_found_by_their_new_name() -> None:
    workers = first, _ = pair()
    complete(workers, 2)
    complete(workers, 4)
    kept = of_both(workers, 2)
    for worker in workers:
        worker.store.follow(Decision(7, {}, (), before=(0, 0), timeline=(7, 2), kept=kept, snapshot_interval=3))
    assert first.held() == [(0, 2, 7), (1, 2, 7)]
    assert first.store.interval == 3
    late = Worker()
    late.store.follow(Decision(7, {}, (), timeline=(7, 2), kept=kept))
    state, came = late.store.load(1, kept, _nothing)
    assert same(state, state_at(2, 1))
    assert came > 0
    first.store.follow(Decision(9, {}, (), before=(8, 2), timeline=(9, 2)))
    assert first.held() == [], "it has slept through a rollback"


def test_a_loaded_tree_shares_no_numbers_with_the_snapshot() -> None:
    tree = state_at(4, 0)
    loaded = apart(tree)
    loaded["column"]["parameters"][1] += 1
    loaded["own"]["rate"] = 2
    assert same(tree, state_at(4, 0))


def test_a_check_sum_is_that_of_its_chunk() -> None:
    tensors = [torch.zeros(3 << 20, dtype=torch.float32), torch.ones(7)]
    before = checks_of(tensors)
    tensors[0][-1] = 1
    assert [one == other for one, other in zip(before, checks_of(tensors), strict=True)] == [True, False]


# ---- memory of the host


CGROUP = {"self/cgroup": "0::/jobs/job_7/step_0"}
AVAILABLE = {"meminfo": "MemTotal: 9 kB\nMemAvailable:    4 kB"}
OLD = "slurm/job_7"
"""A group of the first version."""


@pytest.mark.parametrize(
    ("files", "available"),
    [
        ({}, None),
        (AVAILABLE, 4096),
        (AVAILABLE | {"memory.current": "100", "memory.max": "max"}, 4096),
        (AVAILABLE | {"memory.current": "100", "memory.max": "1100"}, 1000),
        # The limit of every group around a process counts: a batch job's lies below the root of the hierarchy.
        (CGROUP | {"jobs/job_7/step_0/memory.max": "max", "jobs/job_7/step_0/memory.current": "500",
                   "jobs/job_7/memory.max": "2000", "jobs/job_7/memory.current": "700"}, 1300),
        ({"self/cgroup": f"5:devices:/other\n4:memory:/{OLD}\n0::/", f"memory/{OLD}/memory.limit_in_bytes": "2000",
          f"memory/{OLD}/memory.usage_in_bytes": "900",
          f"memory/{OLD}/memory.stat": "active_file 0\ninactive_file 0\ntotal_active_file 100\n"
          "total_inactive_file 200"}, 1400),
        # A group's use counts what was read of the dataset; it is dropped when somebody needs the memory.
        ({"memory.max": "1000", "memory.current": "1000",
          "memory.stat": "anon 100\nfile 900\nshmem 100\nactive_file 300\ninactive_file 500"}, 800),
    ],
    ids=["unknown", "the kernel's", "no limit", "a limit", "of a group around", "of the first version", "files"],
)  # fmt: skip
def test_the_memory_that_is_left_is_that_of_the_host_and_of_every_group_around_the_process(
    tmp_path: Path, files: Mapping[str, str], available: int | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert available_memory(tmp_path, tmp_path) == available
