"""A worker's way back: who is put aside, which update of an orphan counts, ranks; when snapshots are taken.

And which runs have a last resort.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from megatron.core import parallel_state

from recover_megatron.arguments import RecoverConfig
from recover_megatron.collectives.epoch import EpochRevoked, PeerLost
from recover_megatron.errors import UserError
from recover_megatron.instep.decision import Decision, JoinStatus, Rules, Taking
from recover_megatron.instep.faults import Orphaned, RunOver
from recover_megatron.instep.meeting.plan import decide
from recover_megatron.launch.command_line.script import Script
from recover_megatron.megatron_hooks import parallel_groups as groups_module
from recover_megatron.megatron_hooks.checkpoint import memory_tier
from recover_megatron.megatron_hooks.checkpoint.memory_tier import MemoryTier
from recover_megatron.megatron_hooks.checkpoint.state_exchange import StateExchange
from recover_megatron.megatron_hooks.layout import no_rollback_reason
from recover_megatron.megatron_hooks.logging import writers
from recover_megatron.megatron_hooks.loop import rejoin as rejoin_module
from recover_megatron.megatron_hooks.loop.bridge_arguments import BridgeArguments
from recover_megatron.megatron_hooks.loop.rejoin import Rejoin, stop_profiler
from recover_megatron.megatron_hooks.loop.training import TrainingHooks
from recover_megatron.megatron_hooks.loop.training_parts import StepGuard
from recover_megatron.megatron_hooks.loop.untaken_places import MOST, PAUSE_SECONDS
from recover_megatron.megatron_hooks.parallel_groups import Groups, renew_rank_copies
from recover_megatron.workload.grid import Slot, launch_grid

BESIDE = Decision(5, {0: (0, 1), 1: (2, 3)}, (), fresh=(1,))


def test_who_is_put_aside_says_so_to_people_and_waits_for_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    left: list[str] = []
    slept: list[float] = []
    offers: list[dict[str, Any]] = []

    def wait(**offer: Any) -> None:
        offers.append(offer)
        raise RunOver(0, "the training is over")

    nothing: Any = SimpleNamespace(leave_training=lambda: None, left=lambda manager: None)

    def leave(why: str, note: str) -> None:
        left.append(why)
        notes.extend([note] * bool(note))

    manager: Any = SimpleNamespace(leave=leave, wait_for_place=wait, view=SimpleNamespace(worker=4))
    rejoin = Rejoin(manager, nothing, nothing, nothing, nothing)
    tries = iter(range(MOST))
    monkeypatch.setattr(rejoin, "_wait", lambda: (next(tries), BESIDE)[1])
    monkeypatch.setattr("time.sleep", slept.append)

    def fail(decision: Decision) -> None:
        raise PeerLost("gloo could not connect")

    monkeypatch.setattr(rejoin, "_take_place", fail)
    with pytest.raises(RunOver):
        rejoin.come_back()
    told = "it is retired, because it failed 3 times in a row to take a place: gloo could not connect"
    assert notes == [told], "in workers.json"
    assert left[-1] == told, "in recover-status"
    assert slept == [0.0, PAUSE_SECONDS]
    assert offers == [{"position": None, "ready": False}], "it is offered for no place any more"


class Event:
    """Of a device that is done when it is told so."""

    done = False

    def record(self) -> None:
        """Into a stream."""

    def query(self) -> bool:
        return self.done


@pytest.mark.parametrize(
    ("order", "believed"),
    [
        pytest.param("seal", True, id="between_updates-True"),
        pytest.param("begin end done seal", True, id="after_one_that_is_done-True"),
        pytest.param("begin end seal done", False, id="while_one_is_queued-False"),  # done with garbage
        pytest.param("begin seal end done", False, id="while_one_is_made-False"),
        pytest.param("seal begin end done", False, id="before_one-False"),
    ],
)
def test_only_an_update_that_was_carried_out_before_the_abort_counts(order: str, believed: bool) -> None:
    event = Event()
    guard = StepGuard(lambda: event)
    for what in order.split():
        if what == "done":
            event.done = True
        else:
            getattr(guard, what)()
    assert guard.believed is believed
    guard.seal()
    assert guard.believed is believed, "the first abort counts"
    guard.reset()
    assert guard.believed


def test_on_the_cpu_an_update_counts_when_it_has_returned() -> None:
    guard = StepGuard.of(torch.device("cpu"))
    guard.begin()
    guard.end()
    guard.seal()
    assert guard.believed


class Attention(torch.nn.Module):
    """As Transformer Engine's: with the ranks that it was made with; None: without context parallelism."""

    def __init__(self, ranks: list[int] | None) -> None:
        super().__init__()
        self.cp_global_ranks = ranks


def test_every_attention_with_context_parallelism_gets_the_present_ranks_and_no_other_module() -> None:
    layers = [Attention([4, 5]), Attention([4, 5]), Attention(None)]
    chunks = [torch.nn.Sequential(layers[0], torch.nn.Sequential(layers[1])), torch.nn.Sequential(layers[2])]
    renew_rank_copies(chunks, (2, 3))
    assert [layer.cp_global_ranks for layer in layers] == [[2, 3], [2, 3], None]
    assert not hasattr(chunks[0], "cp_global_ranks")
    layers[0].cp_global_ranks.append(9)  # type: ignore[union-attr]
    assert layers[1].cp_global_ranks == [2, 3], "each has a list of its own"


GRID = launch_grid(4, tensor=1, context=1, pipeline=2, inner_ranks=1)
"""Two replicas: workers 0 and 2, 1 and 3."""
NODES = ("a", "b", "a", "b")
RULES = Rules(memory="always", spread=True, holders=2)


class Store:
    """What is begun."""

    interval, size, newest, wanted = 2, 0, None, True

    def __init__(self) -> None:
        self.begun: list[tuple[Taking, set[int], set[int]]] = []

    def finish(self, epoch: int, stay: Any) -> tuple[bool, float]:
        return False, 0.0

    def begin(self, taking: Taking, own: Mapping[int, Any], others: Mapping[int, Any]) -> None:
        self.begun.append((taking, set(own), set(others)))


def in_section(worker: int) -> JoinStatus:
    """All have begun decision 9, a snapshot, after iteration 2."""
    replica, position = GRID.place(worker)
    domains = (f"node {NODES[worker]}",)
    return JoinStatus(
        replica, position, at=9, iteration=3, version=2, node=NODES[worker], domains=domains, peer_store=f"at {worker}"
    )


STATUSES = {worker: in_section(worker) for worker in range(4)}


def tier(
    me: int, decision: Decision, *, version: int = 2, sharded: bool = True, to_come: int = 0
) -> tuple[MemoryTier, Store]:
    """That of worker ``me`` in a section of the epoch of ``decision``.

    ``to_come``: numbers of the model of which there are no moments yet.
    """
    store = Store()
    groups = SimpleNamespace(check=lambda: None, most=lambda values, slots: list(values))
    view = SimpleNamespace(
        worker=me, position=GRID.place(me)[1], grid=GRID, decision=decision, groups=groups, live=frozenset(range(4)),
        snapshots=store, joining_next=False, in_section_of_others=True,
    )  # fmt: skip
    manager: Any = SimpleNamespace(
        view=view, mark=lambda *_, **__: None, log=lambda *_, **__: None, section=lambda kind, run: run()
    )
    without: Any = [torch.zeros(to_come)]
    piece: Any = SimpleNamespace(tensor=without[0], state={}, bucket=0, start=0, stop=to_come, give=lambda a, b: {})
    state: Any = SimpleNamespace(
        version=version, first=1, tree=lambda: {"column": [torch.zeros(100)]}, without_moments=lambda: without
    )
    shards: Any = SimpleNamespace(complete=lambda: None, primaries=lambda: [(None, [piece])]) if sharded else None
    return MemoryTier(manager, state, shards, wanted=True, every=2), store


def test_the_parts_of_all_who_take_a_snapshot_are_those_that_the_plan_wants() -> None:
    decision = decide(5, STATUSES, GRID, RULES)
    for me in range(4):
        memory, store = tier(me, decision)
        memory.at_boundary()
        ((taking, own, others),) = store.begun
        assert own | others == {part for part, its in decision.copies.items() if me in its}
        assert taking == Taking(5, 2, len(decision.copies), together=True)


def test_no_snapshot_with_shards_is_taken_of_those_who_are_about_to_leave() -> None:
    """Node a is drained while all are in the section of a snapshot.  What its workers have of the optimizer's state
    changes hands at the next boundary; the plan has parts for those only who stay."""
    decision = decide(6, STATUSES, GRID, RULES, drain=("a",))
    assert decision.leaving == {0}
    assert len(decision.copies) == GRID.size + 2
    for me in range(4):
        memory, store = tier(me, decision)
        memory.at_boundary()
        assert store.begun == []
    memory, store = tier(3, decision, sharded=False)
    memory.at_boundary()
    assert len(store.begun) == 1, "without shards a part is a position's, of which those who stay have the state"


def test_after_the_run_went_back_to_its_start_a_host_without_the_memory_does_not_end_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_tier, "available_memory", lambda: 1)
    decision = decide(5, STATUSES, GRID, RULES)
    memory, store = tier(0, decision, version=0)
    with pytest.raises(UserError, match="a host lacks the memory for snapshots"):
        memory.at_boundary()
    memory, store = tier(0, replace(decision, timeline=(5, 0)), version=0)
    memory.at_boundary()
    assert store.begun == [], "it is said, and none is taken"


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "in shards"])
def test_a_run_is_refused_at_its_start_that_would_lack_memory_once_it_has_moments(
    monkeypatch: pytest.MonkeyPatch, sharded: bool
) -> None:
    decision = decide(5, STATUSES, GRID, RULES if sharded else replace(RULES, spread=False))
    monkeypatch.setattr(memory_tier, "available_memory", lambda: 50_000)
    for to_come, taken in ((0, True), (10_000, False)):
        memory, store = tier(0, decision, version=0, sharded=sharded, to_come=to_come)
        with nullcontext() if taken else pytest.raises(UserError, match="a host lacks the memory for snapshots"):
            memory.at_boundary()
        assert len(store.begun) == taken


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({}, ""),
        ({"use_distributed_optimizer": True}, ""),
        ({"use_distributed_optimizer": True, "dist_ckpt_optim_fully_reshardable": True}, ""),
        ({"use_distributed_optimizer": True, "ckpt_format": "torch"}, ""),
        ({"use_distributed_optimizer": True, "ckpt_format": "torch_dcp"}, "--ckpt-format torch_dcp"),
        ({"use_megatron_fsdp": True, "use_distributed_optimizer": True, "ckpt_format": "fsdp_dtensor"}, ""),
        ({"no_save_optim": True}, "--no-save-optim"),
        ({"optimizer": "sgd"}, "--optimizer sgd"),  # Megatron itself cannot load it
        ({"optimizer": "sgd", "ckpt_format": "torch"}, ""),
        ({"optimizer": "sgd", "use_distributed_optimizer": True}, ""),
    ],
)
def test_which_runs_go_back_to_their_checkpoints_is_known_at_the_start_and_before_it(
    flags: dict[str, Any], why: str
) -> None:
    args = {"no_save_optim": False, "use_distributed_optimizer": False, "ckpt_format": "torch_dist", **flags}
    optimizer = SimpleNamespace(init_state_fn=None if "optimizer" in flags else lambda optimizer: None)
    words = [
        [f"--{name.replace('_', '-')}", *([value] if isinstance(value, str) else [])] for name, value in flags.items()
    ]
    of_launcher = Script.read("", ["--save", "checkpoints", *itertools.chain(*words)]).no_rollback_reason
    for found in (no_rollback_reason(SimpleNamespace(**args), [optimizer]), of_launcher):
        assert bool(found) == bool(why)
        assert why in found


def test_bridges_loop_goes_back_to_no_checkpoint_and_says_why() -> None:
    assert no_rollback_reason(BridgeArguments(SimpleNamespace())).startswith("Megatron-Bridge")


@pytest.mark.parametrize(("flag", "kept"), [("auto", [(4, "save"), (3, "load")]), ("off", [])])
def test_with_the_last_resort_off_no_checkpoint_is_one_to_go_back_to(flag: str, kept: list[Any]) -> None:
    hooks = object.__new__(TrainingHooks)
    parts: Any = SimpleNamespace(state=SimpleNamespace(no_rollback_reason="", loaded_at_launch=3))
    checkpoints: Any = SimpleNamespace(complete=[(4, "save")], unreadable=set())
    hooks._config, hooks._parts, hooks._checkpoints = RecoverConfig(last_resort=flag), parts, checkpoints
    assert hooks.kept_checkpoints() == (kept, set())


LOST, REPLACED, SECOND_LOST = (
    Decision(2, {1: (1,), 2: (2,)}, ()),
    Decision(3, {0: (3,), 1: (1,), 2: (2,)}, ()),
    Decision(4, {0: (3,), 2: (2,)}, ()),
)


@pytest.mark.parametrize(
    ("asked", "slot", "profiled"),
    [
        ([0], 1, False),  # rank 0 after the first death, without a profiler
        ([1], 1, True),  # rank 0, with one
        ([0, 2], 2, True),
        ([1], 2, False),  # rank 1 after both deaths
        ([], 1, True),
        ([0], 0, True),  # who comes in worker 0's place enters train() as rank 0
    ],
)
def test_a_worker_is_profiled_or_not_as_at_its_entry_whatever_its_rank_becomes(
    asked: list[int], slot: int, profiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """train() makes a profiler for these ranks when it is entered, and asks which ranks they are in each iteration."""
    args = SimpleNamespace(profile_ranks=asked, rank=slot, context_parallel_size=1)
    monkeypatch.setattr(groups_module, "get_args", lambda: args)
    monkeypatch.setattr(parallel_state, "_MPU_DATA_PARALLEL_WORLD_SIZE", None)
    monkeypatch.setattr(parallel_state, "get_data_parallel_world_size", lambda: 3)
    groups = Groups(Slot(slot), (), torch.device("cpu"), alone=True)
    groups._grid = launch_grid(3, tensor=1, context=1, pipeline=1, inner_ranks=1)
    groups._initialize(lambda: None)()
    for decision in (LOST, REPLACED, SECOND_LOST, REPLACED):
        if groups.traffic.me in decision.slots(groups.grid):
            groups.planned(decision)
            assert (args.profile_ranks == [] or args.rank in args.profile_ranks) is profiled


@pytest.mark.parametrize("mine", [True, False])
def test_the_profiler_that_an_orphan_leaves_on_is_stopped_and_one_of_the_script_is_not(
    mine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rejoin_module, "get_args", lambda: SimpleNamespace(profile=mine))
    profiler = torch.profiler.profile()
    profiler.start()
    try:
        stop_profiler(torch.device("cpu"))
        assert [torch.autograd._profiler_enabled(), torch.autograd.profiler._is_profiler_enabled] == [not mine] * 2
    finally:
        if torch.autograd._profiler_enabled():
            profiler.stop()


@pytest.mark.parametrize(
    ("flags", "left"),
    [
        ({"profile": True, "use_pytorch_profiler": True}, {"use_pytorch_profiler": True, "profile": False}),
        ({"profile": True, "use_pytorch_profiler": False}, {}),  # nsys, by the number of the iteration
        ({"profile": True, "use_pytorch_profiler": True, "profile_ranks": [0]}, {}),  # on another rank
        ({"use_pytorch_profiler": True, "profile_ranks": [1]}, {"use_pytorch_profiler": False}),  # Bridge's flags
    ],
)
def test_a_worker_that_comes_in_late_gets_no_profiler_of_other_iterations(
    flags: dict[str, Any], left: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = SimpleNamespace(rank=1, **flags)
    monkeypatch.setattr(rejoin_module, "get_args", lambda: args)
    nothing: Any = SimpleNamespace(leave_training=lambda: None)
    manager: Any = SimpleNamespace(view=SimpleNamespace(worker=4))
    rejoin = Rejoin(manager, nothing, nothing, nothing, nothing)
    monkeypatch.setattr(rejoin, "_wait", lambda: BESIDE)
    monkeypatch.setattr(rejoin, "_take_place", lambda decision: None)
    rejoin.come_back()
    assert vars(args) == {"rank": 1, **flags, **left}


def taking_a_place(monkeypatch: pytest.MonkeyPatch, *, left_in: int) -> list[str]:
    """The order in which a worker that was in an iteration before takes a place in iteration 7."""
    did: list[str] = []

    def does(what: str) -> Any:
        return lambda *_: did.append(what) or 0

    parts: Any = SimpleNamespace(
        open_rings=does("rings"), places=SimpleNamespace(fetch_state=does("state")), state=SimpleNamespace()
    )
    groups: Any = SimpleNamespace(traffic=SimpleNamespace(), regroup=does("mates"))

    @contextmanager
    def take_place(decision: Decision, traffic: Any) -> Iterator[None]:
        did.append("place")
        yield
        did.append("planned")

    view = SimpleNamespace(worker=2, position=0, replica=1, iteration=left_in)
    manager: Any = SimpleNamespace(view=view, take_place=take_place, inject=lambda *_: None)
    guard: Any = SimpleNamespace(reset=lambda: None)
    monkeypatch.setattr(writers, "missed_steps", does("writers"))
    Rejoin(manager, groups, parts, Mock(), guard)._take_place(replace(BESIDE, version=6))
    return did


def test_a_newcomer_begins_to_open_its_rings_before_it_waits_for_mates_or_for_a_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All others need it for their rings before they compute, and its state may be on its way for minutes."""
    did = taking_a_place(monkeypatch, left_in=0)
    assert did.index("rings") < min(did.index("mates"), did.index("state"))


@pytest.mark.parametrize(("left_in", "missed"), [(6, True), (7, False)])
def test_writers_are_told_of_missed_steps_before_one_begins_to_write(
    monkeypatch: pytest.MonkeyPatch, left_in: int, missed: bool
) -> None:
    did = taking_a_place(monkeypatch, left_in=left_in)
    assert ("writers" in did[: did.index("planned")]) == missed


# ---- a state that a worker takes over at a boundary


def repaired(fetch: Any) -> tuple[StateExchange, list[str], list[Any]]:
    """The exchange of worker 2, whose state differs from that of worker 0; a list of the reasons for which the worker
    leaves its place; a list of its marks and of the states that it loads."""
    decision = Decision(5, {0: (0, 1), 1: (2, 3)}, (), at=7, version=6, repaired=(2,), holders={2: (0,)})
    grid = launch_grid(4, tensor=2, context=1, pipeline=1, inner_ranks=1)
    left: list[str] = []
    noted: list[Any] = []
    manager: Any = SimpleNamespace(
        mark=lambda phase, waiting=False: noted.append((phase, waiting)),
        leave=left.append,
        view=SimpleNamespace(
            worker=2,
            decision=decision,
            grid=grid,
            groups=SimpleNamespace(fetch=fetch),
            counted_on={0, 2},
            set_aside=set(),
        ),
    )
    state: Any = SimpleNamespace(room=lambda version: None, load=noted.append)
    return StateExchange(manager, state), left, noted


@pytest.mark.parametrize(
    "error",
    [PeerLost("worker 0 is gone"), EpochRevoked(5), TimeoutError("nobody came")],
    ids=["no holder is left", "the epoch ends", "no holder comes"],
)
def test_a_worker_whose_state_differs_and_gets_no_other_gives_up_its_place(error: Exception) -> None:
    """Else it would compute the next step with a state that is not that of its column."""

    def fetch(*unused: Any, **named: Any) -> None:
        raise error

    exchange, left, noted = repaired(fetch)
    with pytest.raises(Orphaned, match="holds a wrong state, which must not be used"):
        exchange.at_boundary()
    assert noted == []
    (why,) = left
    assert why.startswith("its state differs from its column's state")


def test_a_worker_that_receives_a_state_makes_progress_as_long_as_it_comes() -> None:
    """However large the state is, the worker does not count as hung."""

    def fetch(*unused: Any, progress: Any, **named: Any) -> tuple[str, int]:
        progress()
        progress()
        return "the state", 1 << 40

    exchange, left, noted = repaired(fetch)
    exchange.at_boundary()
    assert (noted, left) == ([("state", False), ("state", False), "the state"], [])


def test_a_holder_is_lost_when_the_run_does_not_count_on_it_and_has_not_set_it_aside() -> None:
    """A worker that was set aside lives, and gives its state."""
    slots: list[set[int]] = []

    def fetch(*unused: Any, lost: Any, **named: Any) -> tuple[str, int]:
        view = exchange._manager.view
        for counted_on, set_aside in (({0, 2}, set()), ({2}, set()), ({2}, {0})):
            view.counted_on, view.set_aside = counted_on, set_aside  # type: ignore[misc]
            slots.append(lost())
        return "the state", 0

    exchange, _, _ = repaired(fetch)
    exchange.at_boundary()
    assert slots == [set(), {0}, set()]
