"""A worker of a broken replica leaves its groups, whatever gloo tells it; over NCCL, on a double of torch's group, it
does so or ends."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from recover_megatron.collectives import torch_nccl
from recover_megatron.collectives.epoch import EpochRevoked, Known, PeerLost
from recover_megatron.collectives.gloo.swappable_group import SwappableGroup
from recover_megatron.collectives.torch_nccl import abortable_options, environment, keep_one_kind, set_environment
from recover_megatron.errors import EXIT_OWN_FAULT
from recover_megatron.instep.groups import model_parallel_groups
from recover_megatron.instep.groups.model_parallel_groups import Calls, Leaving, ModelParallelGroups
from recover_megatron.membership.records import Fenced
from recover_megatron.variables import NCCL2_VARIABLE
from tests.doubles.nccl import streams
from tests.doubles.process_group_nccl import Fabric, ProcessGroupNcclDouble, TwoKinds
from tests.harness import REPOSITORY
from tests.harness.patience import patient
from tests.harness.waiting import DEADLINE

LOOKS = round(model_parallel_groups.LEAVE_SECONDS / model_parallel_groups._LOOK)
COMPUTING = Calls()
DEVICE = torch.device("cuda", 3)
leave = partial(Leaving, device=DEVICE, cuda=streams)


class Ended:
    """In place of the end of the process."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.came = threading.Event()

    def __call__(self, reason: str) -> None:
        self.reasons.append(reason)
        self.came.set()

    def reason(self) -> str:
        assert self.came.wait(DEADLINE)
        (reason,) = self.reasons
        return reason


class MainThread:
    """Where the main thread is, at each look: in one of ``calls`` after the other, then where it was last."""

    def __init__(self, *calls: Calls) -> None:
        self._calls = list(calls)
        self.looks = 0
        self.seen = threading.Event()

    def __call__(self) -> Calls:
        self.looks += 1
        if self.looks > 3 * LOOKS:
            self.seen.set()
        return self._calls.pop(0) if len(self._calls) > 1 else self._calls[0]


def doubles(count: int) -> list[ProcessGroupNcclDouble]:
    return [ProcessGroupNcclDouble(Fabric(), 0, 2, f"group {n}", environment(60)) for n in range(count)]


def leaving_group(group: ProcessGroupNcclDouble, ended: Ended, main: MainThread) -> Leaving:
    """That of one group: it looks often, but only once the abort is over, which takes what the machine takes."""

    def where() -> Calls:
        out._look = 0.0001
        return main()

    out = leave([group], end=ended, where=where)
    return out


def test_all_groups_are_aborted_at_once_and_a_main_thread_that_comes_out_ends_nothing() -> None:
    """One abort waits for a call that the abort of another one ends: in a row they would wait for ever."""
    groups, ended = doubles(3), Ended()
    groups[0].hold_communicator().acquire()
    release = groups[1].abort

    def abort() -> None:
        release()
        groups[0].hold_communicator().release()

    groups[1].abort = abort  # type: ignore[method-assign]
    out = leave(groups, end=ended, where=MainThread(COMPUTING))
    out.begin()
    out.left()
    out._thread.join()
    assert [group.aborted for group in groups] == [True] * 3
    assert {group.aborted_on for group in groups} == {DEVICE.index}, "or else a context is made on the first device"
    assert ended.reasons == []


def test_nothing_is_aborted_before_all_have_heard_and_the_time_for_it_begins_then() -> None:
    """Else a mate's operation would complete, with garbage, before its switch is thrown."""
    (group,), ended, heard = doubles(1), Ended(), threading.Event()
    out = leave([group], all_heard=lambda: (heard.wait(), None)[1], end=ended, where=MainThread(COMPUTING), look=0.0001)
    out.begin()
    out._thread.join(patient(0.1))  # longer than all looks
    assert not group.aborted
    assert ended.reasons == []
    heard.set()
    out.left()
    out._thread.join()
    assert group.aborted


def test_a_worker_that_is_out_of_the_run_aborts_nothing() -> None:
    (group,), ended = doubles(1), Ended()

    def never() -> None:
        raise Fenced("a test puts it out")

    out = leave([group], all_heard=never, end=ended, where=MainThread(COMPUTING))
    out.begin()
    out._thread.join()
    assert (group.aborted, ended.reasons) == (False, [])


def test_an_abort_that_does_not_return_ends_the_worker() -> None:
    groups, ended = doubles(2), Ended()
    groups[0].hold_communicator().acquire()  # by a call that waits for a dead member to connect
    leave(groups, end=ended, look=patient(0.05)).begin()  # the other abort returns before it has looked so often
    assert ended.reason() == "the aborts of 1 NCCL communicators last too long"
    groups[0].hold_communicator().release()


def test_an_abort_that_fails_ends_the_worker() -> None:
    (group,), ended = doubles(1), Ended()

    def abort() -> None:
        raise dist.DistBackendError("NCCL timeout in: NCCLUtils.cpp")

    group.abort = abort  # type: ignore[method-assign]
    leave([group], end=ended).begin()
    assert "NCCL timeout" in ended.reason()


def test_a_main_thread_that_stays_in_one_call_after_the_abort_ends_the_worker() -> None:
    (group,), ended = doubles(1), Ended()
    one, other = (1, 10), (1, 20)
    where = MainThread(Calls([one]), Calls([other]), Calls([other, one]))
    out = leaving_group(group, ended, where)
    out.begin()
    assert ended.reason() == "its main thread is stuck in a call"
    assert where.looks >= LOOKS


@pytest.mark.parametrize("where", ["computes", "makes other calls"])
def test_a_main_thread_that_goes_on_is_waited_for(where: str) -> None:
    """An orphan may compile, or compute for long, before it comes to a group."""
    ended = Ended()
    calls = [COMPUTING] if where == "computes" else [Calls([(1, 10 + look % 2)]) for look in range(4 * LOOKS)]
    main = MainThread(*calls)
    out = leaving_group(*doubles(1), ended, main)
    out.begin()
    assert main.seen.wait(DEADLINE)
    out.left()
    out._thread.join()
    assert ended.reasons == []


def test_a_worker_that_cannot_leave_its_groups_says_where_its_main_thread_is(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(model_parallel_groups.os, "_exit", codes.append)

    def operation_that_no_mate_answers() -> None:
        ending = threading.Thread(target=model_parallel_groups.end_process, args=["a test ends it"])
        ending.start()
        ending.join()

    operation_that_no_mate_answers()
    said = capfd.readouterr().err
    assert "in operation_that_no_mate_answers" in said, "the stack of the main thread, not of the one that ends it"
    assert "cannot leave the groups of its broken replica within 10 s (a test ends it)" in said
    assert codes == [EXIT_OWN_FAULT]


STUCK = """
import threading
import torch
from tests.doubles.nccl import streams
from tests.doubles.process_group_nccl import Fabric, ProcessGroupNcclDouble
from recover_megatron.instep.groups import model_parallel_groups
model_parallel_groups.LEAVE_SECONDS = 0.5
model_parallel_groups._CALLS += ("/tests/doubles/",)
fabric = Fabric()
fabric.held_in_launch.add(0)
group = ProcessGroupNcclDouble(fabric, 0, 2, "tp", {})
def mate_dies():
    group.launching.wait()
    fabric.kill(1)
    model_parallel_groups.Leaving([group], torch.device("cpu"), cuda=streams).begin()
threading.Thread(target=mate_dies, daemon=True).start()
group.allreduce([])
"""


@pytest.mark.slow
def test_a_worker_that_spins_in_a_group_launch_whose_communicator_was_aborted_ends_with_1() -> None:
    """By torch's own timeout it would spin for half an hour."""
    command = [sys.executable, "-c", STUCK]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=DEADLINE)
    assert ended.returncode == EXIT_OWN_FAULT, ended.stderr
    assert "cannot leave the groups of its broken replica" in ended.stderr + ended.stdout


# ---- the groups of a replica


class Inside:
    """The groups inside a replica of two, over doubles."""

    def __init__(self) -> None:
        self.fabric = Fabric()
        self.environ = environment(60)
        self.made: list[ProcessGroupNcclDouble] = []
        self.given: list[Any] = []
        self.ended = Ended()
        self.mate_is_there = True
        self.leavings: list[Leaving] = []
        self.groups = ModelParallelGroups((), DEVICE, self._make, self._leaving)
        self.options = object()
        alone: Any = dist.ProcessGroup(0, 1)
        self.tensor = SwappableGroup(alone, [0, 1], 0, "tp-0-1#0", "nccl", placeholder=True, options=self.options)
        self.groups.keep(self.tensor)

    def _make(self, store: Any, name: str, rank: int, size: int, device: torch.device, options: Any) -> Any:
        self.given.append(options)
        self.made.append(ProcessGroupNcclDouble(self.fabric, rank, size, name, self.environ))
        return self.made[-1]

    def _leaving(self, groups: Any, device: torch.device, all_heard: Any) -> Leaving:
        self.leavings.append(Leaving(groups, device, all_heard, cuda=streams, end=self.ended))
        return self.leavings[-1]

    def rebuild(self, *, over: bool = False) -> None:
        epoch: Any = SimpleNamespace(number=3, over=over, on_end=lambda call: None)
        store: Any = Known({"inside/3/0/here/0": "1"} | ({"inside/3/0/here/1": "1"} if self.mate_is_there else {}))
        store.close = lambda: None
        self.groups.rebuild(epoch, 0, store, "127.0.0.1")


def test_groups_that_are_made_anew_keep_their_options_and_are_aborted_once_when_the_replica_breaks() -> None:
    inside = Inside()
    inside.rebuild()
    assert inside.given == [inside.options]
    assert inside.made[0].connected, "not by its first operation, to which a mate that compiles comes too late"
    assert inside.tensor.allreduce([torch.ones(1)]).is_completed()
    inside.groups.end()
    inside.groups.end()
    inside.groups.left()
    inside.rebuild()
    first, second = inside.made
    for out in inside.leavings:
        out._thread.join()
    assert (first.aborts, first.aborted, second.aborted) == (1, True, False)
    assert inside.tensor.inner is second
    assert inside.ended.reasons == []


def test_a_group_in_which_a_mate_dies_before_it_is_connected_is_aborted_and_the_place_is_lost() -> None:
    """No fault of this worker: it is a spare again, as ``PeerLost`` says."""
    inside = Inside()
    inside.environ = environment(60) | {"TORCH_NCCL_NONBLOCKING_TIMEOUT": "0"}
    inside.fabric.held_in_launch.add(0)
    with pytest.raises(PeerLost):
        inside.rebuild()
    inside.groups.end()
    inside.groups.left()
    inside.leavings[-1]._thread.join()
    (group,) = inside.made
    assert (group.aborts, group.connected) == (1, False)


def test_while_a_mate_has_not_come_no_group_is_opened_and_the_end_of_the_epoch_ends_the_wait() -> None:
    inside = Inside()
    inside.mate_is_there = False
    ends: list[Any] = []
    epoch: Any = SimpleNamespace(number=3, over=False, on_end=lambda call: (ends.append(call), call("revoked")))
    store: Any = Known({"inside/3/0/here/0": "1"})
    store.close = lambda: None
    with pytest.raises(EpochRevoked):
        inside.groups.rebuild(epoch, 0, store, "127.0.0.1")
    assert inside.made == []
    assert len(ends) == 1


def test_a_replica_that_breaks_while_its_groups_are_opened_makes_no_more_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inside = Inside()
    alone: Any = dist.ProcessGroup(0, 1)
    inside.groups.keep(SwappableGroup(alone, [0, 1], 0, "pp-0-1#0", "nccl", placeholder=True))
    connect = ProcessGroupNcclDouble.eager_connect_single_device

    def broken_meanwhile(group: ProcessGroupNcclDouble, device: Any) -> None:
        inside.groups.end()
        connect(group, device)

    monkeypatch.setattr(ProcessGroupNcclDouble, "eager_connect_single_device", broken_meanwhile)
    with pytest.raises((PeerLost, EpochRevoked)):
        inside.rebuild()
    inside.groups.left()
    for out in inside.leavings:
        out._thread.join()
    (group,) = inside.made
    assert (group.aborts, group.aborted) == (1, True)


def test_a_failed_operation_counts_as_completed_and_none_is_asked() -> None:
    """So the methods of a group over NCCL are torch's own, in which nobody looks at that."""
    inside = Inside()
    inside.rebuild()
    inside.fabric.kill(1)
    work = inside.tensor.allreduce([torch.ones(1)])
    assert work.wait()  # the host does not wait, and nobody has noticed
    assert not work.is_completed()
    inside.made[0].watch()
    assert work.is_completed()
    with pytest.raises(dist.DistBackendError):
        work.wait()


# ---- the environment


@pytest.mark.parametrize(("hang_timeout", "seconds"), [(60, 25), (600, 25), (30, 15), (1, 1)])
def test_a_launch_that_spins_ends_before_its_worker_counts_as_hung(hang_timeout: float, seconds: int) -> None:
    assert environment(hang_timeout)["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == str(seconds)


def test_a_users_own_values_stand_and_those_against_recovery_are_named() -> None:
    environ: dict[str, str] = {}
    assert set_environment(60, environ) == []
    assert environ == environment(60)
    environ |= {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_NONBLOCKING_TIMEOUT": "40"}
    assert set_environment(60, environ) == []
    environ |= {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "TORCH_NCCL_NONBLOCKING_TIMEOUT": "120",
                "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "one"}  # fmt: skip
    before = dict(environ)
    assert set_environment(60, environ) == [
        "TORCH_NCCL_ASYNC_ERROR_HANDLING=3 instead of 0",
        "TORCH_NCCL_NONBLOCKING_TIMEOUT=120 instead of 25",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC=one instead of 1",
    ]
    assert environ == before


@pytest.fixture(params=["2.14", "2.15", "installed"])
def torch_of_two_kinds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The version of a torch that has ProcessGroupNCCL2, and has not used the name "nccl" yet."""
    version: str = request.param
    if version != "installed":
        double = TwoKinds(version)
        monkeypatch.setattr(torch_nccl, "dist", double)
        monkeypatch.setattr(torch_nccl, "c10d", double)
    elif not hasattr(torch_nccl.c10d, "ProcessGroupNCCL2"):
        pytest.skip(f"torch {torch.__version__} has one kind of group over NCCL")
    else:
        monkeypatch.setattr(dist.Backend, "_plugins", {})
        version = ".".join(torch.__version__.split(".")[:2])
    monkeypatch.setattr(os, "environ", dict(os.environ))
    os.environ.pop(NCCL2_VARIABLE, None)
    return version


@pytest.mark.parametrize("given", [None, "", "0"])
def test_groups_of_the_start_are_of_the_kind_that_is_made_after_a_death(
    torch_of_two_kinds: str, monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    said: list[str] = []
    monkeypatch.setattr(torch_nccl.log, "info", said.append)
    os.environ.update({} if given is None else {NCCL2_VARIABLE: given}, RANK="0")
    assert keep_one_kind(os.environ) == []
    torch_nccl.dist.BackendConfig("nccl")  # of a group that is made later
    creator = torch_nccl.dist.Backend._plugins["NCCL"].creator_fn
    assert creator == torch_nccl.c10d._create_nccl_process_group
    (line,) = said
    assert "NCCL groups use ProcessGroupNCCL, not ProcessGroupNCCL2 (TORCH_DIST_USE_NCCL2=0)" in line


def test_who_asks_for_the_other_kind_is_refused_and_nothing_is_settled(torch_of_two_kinds: str) -> None:
    os.environ[NCCL2_VARIABLE] = "1"
    (reason,) = keep_one_kind(os.environ)
    assert reason.startswith("TORCH_DIST_USE_NCCL2=1 selects ")
    assert "unset the variable" in reason
    assert "NCCL" not in torch_nccl.dist.Backend._plugins


def test_a_name_that_means_the_other_kind_already_is_refused(torch_of_two_kinds: str) -> None:
    torch_nccl.dist.BackendConfig("nccl")
    reasons = [reason.partition(" when")[0] for reason in keep_one_kind(os.environ)]
    assert reasons == ([] if torch_of_two_kinds == "2.14" else ["--recover needs TORCH_DIST_USE_NCCL2=0"])


def test_torch_of_one_kind_is_asked_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch_nccl.c10d, "ProcessGroupNCCL2", raising=False)
    environ = {NCCL2_VARIABLE: "1"}
    assert keep_one_kind(environ) == []
    assert environ == {NCCL2_VARIABLE: "1"}


@pytest.mark.skipif(not hasattr(dist, "ProcessGroupNCCL"), reason="this torch was built without NCCL")
def test_options_of_a_group_that_is_made_anew_are_those_given_but_for_what_an_abort_needs() -> None:
    given = dist.ProcessGroupNCCL.Options()
    given.is_high_priority_stream = True
    given.config.max_ctas, given.config.net_name, given.config.blocking = 8, "Socket", 1
    options = abortable_options(given)
    assert options.is_high_priority_stream
    assert (options.config.max_ctas, options.config.net_name, options.config.blocking) == (8, "Socket", 0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["messages", "collectives", "scattered"])
def test_whoever_waits_inside_a_broken_replica_comes_out(tmp_path: Path, kind: str) -> None:
    """Twenty-four pairs of workers: without the guard three of them, by the average, are stuck."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.instep.pairs", str(tmp_path), kind]
    ended = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
