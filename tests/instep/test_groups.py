"""Operations over replicas: known, or the end of the run with their place; on copies; their groups, and the rings."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.training.utils import average_losses_across_data_parallel_group
from torch.distributed import _functional_collectives
from torch.distributed import distributed_c10d as c10d

from recover_megatron.collectives.epoch import EpochRevoked
from recover_megatron.collectives.gloo.swappable_group import SwappableGroup
from recover_megatron.collectives.ledger import Bucket
from recover_megatron.collectives.nccl import library as libraries
from recover_megatron.instep.faults import UnknownOperation
from recover_megatron.instep.groups import epoch_groups
from recover_megatron.instep.groups.epoch_groups import OPENER, CommunicationConfig, EpochGroups
from recover_megatron.instep.groups.process_group import EpochGroup, register_new
from recover_megatron.instep.groups.traffic import Caller, Mode, Staged, Traffic
from recover_megatron.instep.hooks import ProgressReports
from recover_megatron.instep.meeting.rendezvous import SavedInputs
from recover_megatron.megatron_hooks.parallel_groups import Groups, is_averaged, is_known
from recover_megatron.network.peer_store import PeerStoreServer
from recover_megatron.workload.grid import Slot, launch_grid
from tests.doubles.nccl import library as nccl_double
from tests.harness.waiting import DEADLINE

REPLICAS = (0, 1, 2)


@pytest.fixture
def traffic() -> Traffic:
    """Of worker 1 in three replicas of one worker, inside a step; it knows of nothing."""
    grid = launch_grid(3, tensor=1, context=1, pipeline=1, inner_ranks=1)
    assignment = SimpleNamespace(started=False, grid=grid, replica=1)
    said: list[tuple[int, str]] = []
    session = SimpleNamespace(said=said, give_up=lambda code, reason: said.append((code, reason)))
    traffic = Traffic(1, Mode.STEP)
    traffic.recovery = SimpleNamespace(session=session, assignment=assignment)  # type: ignore[assignment]
    return traffic


@pytest.fixture
def group(traffic: Traffic) -> Iterator[EpochGroup]:
    world = c10d._world
    tables = (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config)
    made = EpochGroup(traffic, None, REPLICAS, "data_parallel")
    register_new(made, REPLICAS, "gloo")
    yield made
    for table in tables:
        table.pop(made, None)


def ones(many: int = 1) -> torch.Tensor:
    return torch.ones(many)


def lists() -> list[torch.Tensor]:
    return [ones() for _ in REPLICAS]


OPERATIONS: dict[str, Callable[[EpochGroup], Any]] = {
    "allreduce": lambda group: dist.all_reduce(ones(), group=group),
    "allreduce async": lambda group: dist.all_reduce(ones(), group=group, async_op=True),
    "broadcast": lambda group: dist.broadcast(ones(), 0, group=group),
    "reduce": lambda group: dist.reduce(ones(), 1, group=group),
    "allgather": lambda group: dist.all_gather(lists(), ones(), group=group),
    "_allgather_base": lambda group: dist.all_gather_into_tensor(ones(3), ones(), group=group),
    "gather": lambda group: dist.gather(ones(), lists(), 1, group=group),
    "scatter": lambda group: dist.scatter(ones(), lists(), 1, group=group),
    "_reduce_scatter_base": lambda group: dist.reduce_scatter_tensor(ones(), ones(3), group=group),
    "reduce_scatter": lambda group: dist.reduce_scatter(ones(), lists(), group=group),
    "alltoall": lambda group: dist.all_to_all(lists(), lists(), group=group),
    "alltoall_base": lambda group: dist.all_to_all_single(ones(3), ones(3), group=group),
    "barrier": lambda group: dist.barrier(group=group),
    "monitored_barrier": lambda group: group.monitored_barrier(),
    "send": lambda group: dist.send(ones(), 2, group=group),
    "recv": lambda group: dist.recv(ones(), 0, group=group),
    "allgather objects": lambda group: dist.all_gather_object([None] * 3, "mine", group=group),
    "broadcast objects": lambda group: dist.broadcast_object_list(["mine"], 0, group=group),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_is_not_known_ends_the_run_and_names_the_place(traffic: Traffic, group: EpochGroup, name: str) -> None:
    with pytest.raises(UnknownOperation) as raised:
        OPERATIONS[name](group)
    text = str(raised.value)
    assert f"{__file__}:" in text
    assert name.split()[0].strip("_").split("_base")[0] in text
    assert "data_parallel" in text
    (told,) = traffic.recovery.session.said  # type: ignore[union-attr]
    assert told == (1, text)


class Torchs(dist.ProcessGroup):
    """A group that torch has made, as far as it is looked at."""

    group_name = "torch's"


@pytest.fixture
def script_makes(traffic: Traffic, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """``dist.new_group`` as a script calls it on worker 1 of three; torch's own is a stand-in."""
    groups = Groups(Slot(1), (), torch.device("cpu"))
    assignment: Any = traffic.recovery.assignment  # type: ignore[union-attr]
    assignment.occupants = {Slot(rank): rank for rank in REPLICAS}
    groups._grid, groups.traffic, made = assignment.grid, traffic, list[Any]()

    def torchs(ranks: list[int], **_: Any) -> Any:
        made.append(Torchs(0, len(ranks)))
        register_new(made[-1], tuple(map(Slot, sorted(ranks))), "gloo")
        return made[-1]

    new_group = groups._new_group(torchs)

    def makes(*ranks: Any, **options: Any) -> Any:
        groups.alone = traffic.mode is Mode.ALONE
        with monkeypatch.context() as patches:
            patches.setattr(dist, "is_initialized", lambda: True)
            patches.setattr(dist, "get_world_size", lambda: 3)
            patches.setattr(dist, "get_backend", lambda group=None: "gloo")
            return new_group(*ranks, **options)

    yield makes
    for table in (c10d._world.pg_map, c10d._world.pg_names, c10d._world.pg_group_ranks, c10d._world.pg_backend_config):
        for group in list(table):
            if group in made or isinstance(group, (EpochGroup, SwappableGroup)):
                table.pop(group)


def test_a_group_that_a_script_makes_over_replicas_is_seen(traffic: Traffic, script_makes: Callable[..., Any]) -> None:
    """And one inside a replica can be made anew among others, also by who builds its model while the others train."""
    traffic.mode = Mode.STARTING
    over, inside = script_makes([2, 1]), script_makes([1])
    assert (type(over), over.workers, over.label) == (EpochGroup, (1, 2), "new_group")
    assert (type(inside), inside.own_name) == (SwappableGroup, "new_group-0#0")
    traffic.mode = Mode.STEP
    with pytest.raises(UnknownOperation, match=f"allreduce at {__file__}:.* \\(group new_group of 2 workers\\)"):
        dist.all_reduce(ones(), group=over)
    traffic.mode = Mode.ALONE
    assert script_makes([0, 1, 2], backend="gloo", group_desc="Mine").label == "mine"
    assert script_makes([1]).own_name == "new_group-0#1"
    assert script_makes([0, 2]) is dist.GroupMember.NON_GROUP_MEMBER


@pytest.mark.parametrize("mode", [Mode.STEP, Mode.OPEN, Mode.SECTION])
def test_a_group_over_replicas_that_is_made_too_late_is_named(
    traffic: Traffic, script_makes: Callable[..., Any], mode: Mode
) -> None:
    traffic.mode = mode
    with pytest.raises(UnknownOperation, match=f"new_group at {__file__}:.* was created after the training began"):
        script_makes([0, 1])
    assert not isinstance(script_makes([0, 2]), EpochGroup), "this worker has no part in it"


def test_functional_collectives_do_not_pass_by(group: EpochGroup) -> None:
    """They look a group up by its name, in a table of torch's that has its own group of all of the launch."""
    with pytest.raises(RuntimeError, match="group"):
        _functional_collectives.all_reduce(ones(), "sum", group=group)


def test_what_is_known_sends_nothing(traffic: Traffic, group: EpochGroup) -> None:
    traffic._known = lambda caller: caller.function.startswith("test_what_is_known")
    value = ones()
    dist.all_reduce(value, group=group)
    assert value.item() == 1


def test_the_functions_that_are_known_are_megatrons() -> None:
    """One of the same name elsewhere is not, nor is anything else that they do."""
    assert is_known(Caller("megatron.training.training", "train_step", "allreduce"))
    assert not is_known(Caller("megatron.training.training", "train_step", "broadcast"))
    assert not is_known(Caller("megatron.training.training", "training_log", "allreduce"))
    assert not is_known(Caller("__main__", "train_step", "allreduce"))


@pytest.mark.parametrize("mode", [Mode.STEP, Mode.DEFERRED])
def test_a_mean_over_replicas_of_what_belongs_to_a_microbatch_is_each_ones_own(
    traffic: Traffic, group: EpochGroup, mode: Mode
) -> None:
    """In an evaluation, too, where one replica may run more of them than another."""
    traffic.mode, traffic._averages = mode, is_averaged
    losses = average_losses_across_data_parallel_group([torch.tensor(7.0), torch.tensor(0.5)], group=group)
    assert losses.tolist() == [7.0, 0.5]


def test_a_worker_is_marked_as_waiting_while_it_is_in_an_operation_of_a_section(
    traffic: Traffic, group: EpochGroup
) -> None:
    """A worker that hangs meanwhile is found by the hang timeout, not later, by the time limit of the operation."""
    marks: list[tuple[str, bool]] = []
    session: Any = SimpleNamespace(mark=lambda iteration, phase, microbatch, waits, allow: marks.append((phase, waits)))
    hooks: Any = SimpleNamespace(iteration=lambda: 3, inject=lambda phase, iteration: None)
    recovery: Any = traffic.recovery
    recovery.progress = ProgressReports(session, hooks)
    recovery.sections = SimpleNamespace(kept=SimpleNamespace(keep=lambda spoiled: None))
    meanwhile: list[tuple[str, bool]] = []

    def control(label: str, members: Any) -> Any:
        """Opens the group, which waits for the other workers, too."""
        meanwhile.append(marks[-1])
        return SimpleNamespace(call=lambda operation: meanwhile.append(marks[-1]))

    recovery.assignment.epoch_groups = SimpleNamespace(control=control, lost_ends_it=nullcontext)
    recovery.progress.mark("checkpoint")
    with traffic.during(Mode.SECTION):
        dist.all_reduce(ones(), group=group)
    assert meanwhile == [("data_parallel operation", True)] * 2
    assert marks[-1] == ("checkpoint", False), "it goes on with what it did"


def test_a_group_that_was_registered_can_be_destroyed_and_leaves_nothing() -> None:
    """Megatron destroys some of its groups when the model is built once more, for another position."""
    world = c10d._world
    maps = (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag)
    before = [len(known) for known in maps]
    group = EpochGroup(Traffic(0, Mode.STEP), None, (0, 1), "data_parallel_group_gloo")
    register_new(group, (0, 1), "gloo")
    assert [len(known) for known in maps] == [count + 1 for count in before]
    dist.destroy_process_group(group)
    assert [len(known) for known in maps] == before


def test_the_key_of_the_rings_shows_itself_in_no_traceback() -> None:
    comm_config = CommunicationConfig(
        PeerStoreServer("127.0.0.1", b"the ring's own key"), b"the ring's own key", torch.device("cpu")
    )
    assert "own key" not in repr(comm_config)
    assert "127.0.0.1" in repr(comm_config)


class _Doubling:
    """A backend whose operations double the tensors they are given, wherever these are in the arguments."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> str:
        assert opts == "options"
        for output in outputs[0]:
            output.copy_(2 * inputs[0])
        self.seen = [*outputs[0], *inputs]
        return "work"

    def allreduce(self, tensors: list[torch.Tensor]) -> None:
        tensors[0] *= 2

    def _reduce_scatter_base(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        output.copy_(2 * tensor[: len(output)])


def test_a_result_reaches_the_tensors_when_it_is_brought_back() -> None:
    whole = torch.zeros(2, 6)
    outputs, source = list(whole[:, ::2]), torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    backend, staged = _Doubling(), Staged(away=lambda tensor: True)

    assert staged.to(backend).allgather([outputs], [source], "options") == "work"
    assert all(tensor.is_contiguous() for tensor in backend.seen)
    assert not whole.any()  # a revocation here leaves everything as it was

    staged.bring_back()
    assert torch.equal(whole[:, ::2], torch.tensor([[2.0, 4.0, 6.0]] * 2))
    assert not whole[:, 1::2].any()
    assert source.tolist() == [1.0, 2.0, 3.0]


def test_tensors_on_the_host_that_are_not_read_are_not_copied() -> None:
    backend, outputs, source = _Doubling(), [torch.zeros(3)], torch.ones(3)
    Staged().to(backend).allgather([outputs], [source], "options")
    assert backend.seen[0] is outputs[0]
    assert backend.seen[1] is source


def test_nothing_is_left_of_an_attempt_with_others() -> None:
    staged, outputs = Staged(every_result=True), [torch.zeros(1), torch.zeros(1)]
    staged.to(_Doubling()).allgather([outputs], [torch.ones(1)], "options")
    staged.to(_Doubling()).allgather([outputs[:1]], [torch.ones(1)], "options")
    staged.bring_back()
    assert [output.item() for output in outputs] == [2.0, 0.0]


def test_an_operation_in_place_that_is_interrupted_begins_again_with_its_input() -> None:
    """On the host, too: the first attempt has written over its tensor when it fails, or is not agreed upon."""
    staged, value = Staged(), torch.ones(2)
    for _ in range(3):
        staged.to(_Doubling()).allreduce([value])
        assert value.tolist() == [1.0, 1.0]
    staged.bring_back()
    assert value.tolist() == [2.0, 2.0]
    assert staged.spoiled == [value]


def test_an_output_inside_the_input_is_an_operation_in_place() -> None:
    staged, whole = Staged(), torch.tensor([1.0, 2.0, 3.0, 4.0])
    for _ in range(2):
        staged.to(_Doubling())._reduce_scatter_base(whole[:2], whole)
        assert whole.tolist() == [1.0, 2.0, 3.0, 4.0]
    staged.bring_back()
    assert whole.tolist() == [2.0, 4.0, 3.0, 4.0]


def test_a_section_that_is_run_again_finds_its_tensors_as_the_first_one_did() -> None:
    kept, first, second = SavedInputs(), torch.ones(2), torch.zeros(2)
    for factor in (2, 3):
        kept.keep([first, second])
        first *= factor
        second += factor
    kept.restore()
    assert (first.tolist(), second.tolist()) == ([1.0, 1.0], [0.0, 0.0])
    kept.keep([first])
    first *= 2
    kept.forget()  # the section is over
    kept.restore()
    assert first.tolist() == [2.0, 2.0]


# ---- the rings of an epoch over NCCL (its double)

COLUMNS = (Slot(0), Slot(1)), (Slot(1), Slot(0))


class Two:
    """Both members of both columns, with a device each; ``noted``: what member 0 begins to open, and has open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.noted: list[tuple[str, tuple[Slot, ...]]] = []
        self.began = threading.Event()
        self._open_group = epoch_groups.open_group
        self.double = nccl_double()
        monkeypatch.setattr(libraries, "load", lambda: self.double)
        monkeypatch.setattr(epoch_groups, "open_group", self._opened)
        servers = [PeerStoreServer("127.0.0.1", b"secret") for _ in range(2)]
        configs = [
            CommunicationConfig(server, b"secret", torch.device("cpu", at), collective="native")
            for at, server in enumerate(servers)
        ]
        addresses = {Slot(at): server.address for at, server in enumerate(servers)}
        self.first, self.second = (EpochGroups(1, Slot(at), config, addresses) for at, config in enumerate(configs))

    def _opened(self, column: Any, *args: Any, **settings: Any) -> Any:
        if column.me != 0:
            return self._open_group(column, *args, **settings)
        self.noted.append(("begins", column.members))
        self.began.set()
        group = self._open_group(column, *args, **settings)
        self.noted.append(("open", column.members))
        return group


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[Two]:
    both = Two(monkeypatch)
    yield both
    both.first.close()
    both.second.close()


def test_rings_open_while_a_member_does_something_else_one_after_the_other_on_its_device(two: Two) -> None:
    """Also one that is asked for meanwhile: both members have one order."""
    two.first.open_rings(COLUMNS[:1])
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(two.first.ring, COLUMNS[1])
        found = [two.second.ring(column) for column in COLUMNS]
        assert [asked.result(DEADLINE).size, *(ring.size for ring in found)] == [2, 2, 2]
    assert two.noted == [(what, column) for column in COLUMNS for what in ("begins", "open")]


def test_columns_of_a_device_are_summed_one_after_the_other(two: Two) -> None:
    """In one thread (see tests/collectives/test_progress.py), which works on that device."""
    with ThreadPoolExecutor() as pool:
        opened = pool.submit(lambda: [two.first.ring(column) for column in COLUMNS])
        rings = [two.second.ring(column) for column in COLUMNS], opened.result(DEADLINE)
    for first, second in rings:
        assert first._progress is second._progress
    buckets = [[Bucket(torch.ones(8)) for _ in COLUMNS] for _ in rings]
    sums = [
        ring.all_reduce(bucket)
        for its, of in zip(rings, buckets, strict=True)
        for ring, bucket in zip(its, of, strict=True)
    ]
    for handle in sums:
        handle.wait(DEADLINE)
    assert [bucket.flat.tolist() for of in buckets for bucket in of] == [[2.0] * 8] * 4
    assert not two.double.core.strays


@pytest.mark.parametrize("ends", [False, True])
def test_closed_groups_keep_no_memory_of_the_device_whoever_holds_them(two: Two, ends: bool) -> None:
    """A view that was taken before a step holds those of an epoch that ends in it."""

    def work() -> list[weakref.ref[torch.Tensor]]:
        with ThreadPoolExecutor() as pool:
            opened = pool.submit(two.first.ring, COLUMNS[0])
            rings: list[Any] = [two.second.ring(COLUMNS[0]), opened.result(DEADLINE)]
        for handle in [ring.all_reduce(Bucket(torch.ones(8))) for ring in rings]:
            handle.wait(DEADLINE)
        return [weakref.ref(room) for ring in rings for room in ring._executor._scratch._free]

    rooms = work()
    assert [room() is None for room in rooms] == [False, False]
    for groups in (two.first, two.second):
        if ends:
            groups.end("a worker is lost")
        groups.close()
    assert [room() is None for room in rooms] == [True, True]


def test_the_end_of_the_epoch_ends_what_is_being_opened_and_nothing_more_is(two: Two) -> None:
    def opening() -> bool:
        return OPENER in {thread.name for thread in threading.enumerate()}

    two.first.open_rings(COLUMNS)
    assert opening()
    assert two.began.wait(DEADLINE)
    two.first.end("the other one has died")
    two.first.close()
    assert not opening()
    assert two.noted == [("begins", COLUMNS[0])]
    with pytest.raises(EpochRevoked, match="has died"):
        two.first.ring(COLUMNS[1])
