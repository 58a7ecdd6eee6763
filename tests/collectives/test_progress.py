"""What the handles of a group end with, whatever error its thread meets."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from recover_megatron.collectives.epoch import CancelToken, CollectiveMismatch, EpochRevoked, PeerLost
from recover_megatron.collectives.progress import Executor, ProgressThread, Task
from tests.harness.waiting import DEADLINE

ABORTED = dist.DistBackendError("NCCL communicator was aborted on rank 1.")


class Scripted(Executor[Task]):
    """Carries nothing out: ``work`` is called for the first task, ``settled`` when the thread settles."""

    scratch_peak = 0
    closed = False

    def __init__(self, work: Callable[[], None], settled: Callable[[], None] = lambda: None) -> None:
        self.tasks: list[Task] = []
        self._work = work
        self._settled = settled

    def add(self, task: Task) -> None:
        self.tasks.append(task)

    @property
    def busy(self) -> bool:
        return bool(self.tasks)

    def advance(self) -> None:
        self._work()

    def quiesce(self) -> None:
        assert not self.closed, "it may be used by another owner"
        self._settled()

    def close(self) -> None:
        self.closed = True


def failing(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def ended(executor: Scripted, token: CancelToken) -> BaseException:
    """What the handle of the only task ends with."""
    thread = ProgressThread(token, "scripted")
    thread.serve(executor)
    handle = thread.submit(executor, Task())
    with pytest.raises(Exception) as told:  # noqa: PT011  which one is for the caller to judge
        handle.wait(DEADLINE)
    return told.value


def test_what_an_abort_by_another_thread_makes_an_operation_raise_is_the_revocation() -> None:
    token, begun = CancelToken(7), threading.Event()

    def aborted_while_it_posts() -> None:
        begun.set()
        assert token.wait(DEADLINE)
        raise ABORTED

    def revoke() -> None:
        assert begun.wait(DEADLINE)
        token.cancel("worker 3 is gone")

    threading.Thread(target=revoke, daemon=True).start()
    error = ended(Scripted(aborted_while_it_posts), token)
    assert isinstance(error, EpochRevoked)
    assert (error.epoch, error.reason) == (7, "worker 3 is gone")
    assert token.lost is None


@pytest.mark.parametrize("error", [ABORTED, dist.DistNetworkError("the store is gone"), PeerLost("hung up")], ids=repr)
def test_a_communication_error_that_comes_before_the_revocation_makes_one(error: Exception) -> None:
    token = CancelToken(7)
    told = ended(Scripted(failing(error)), token)
    assert isinstance(told, EpochRevoked)
    assert str(error) in told.reason
    assert token.cancelled
    assert token.lost is not None


def test_an_error_that_is_no_communications_is_told_as_it_is() -> None:
    mismatch = CollectiveMismatch("two sums in different orders")
    assert ended(Scripted(failing(mismatch)), CancelToken(7)) is mismatch


@pytest.mark.parametrize("first", [PeerLost("hung up"), RuntimeError("of its own")], ids=repr)
def test_a_device_that_fails_while_the_group_settles_ends_every_handle_with_its_error(first: Exception) -> None:
    """Neither finished nor untouched: a handle that told of a revocation would have the bucket believed."""
    broken = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    both_there = threading.Event()

    def fail() -> None:
        assert both_there.wait(DEADLINE)
        raise first

    thread, executor = ProgressThread(CancelToken(7), "scripted"), Scripted(fail, failing(broken))
    thread.serve(executor)
    handles = [thread.submit(executor, Task()), thread.submit(executor, Task())]
    both_there.set()
    for handle in handles:
        with pytest.raises(torch.AcceleratorError):
            handle.wait(DEADLINE)
    with pytest.raises(torch.AcceleratorError):
        thread.submit(executor, Task())


def test_tasks_of_several_executors_are_carried_out_in_the_order_in_which_they_were_handed_in() -> None:
    order: list[str] = []
    token = CancelToken(7)
    thread = ProgressThread(token, "of a device")

    def serve(name: str) -> Scripted:
        """It finishes a task at each turn, and notes it in ``order``."""

        def finish_one() -> None:
            order.append(name)
            executor.tasks.pop(0).handle.finish()

        executor = Scripted(finish_one)
        thread.serve(executor)
        return executor

    dense, experts = serve("dense"), serve("experts")
    wanted = ["dense", "experts", "experts", "dense", "experts"] * 20
    for name in wanted:
        thread.submit(dense if name == "dense" else experts, Task())
    thread.close(dense)
    assert dense.closed
    assert order.count("dense") == wanted.count("dense"), "what was handed in is finished first"
    with pytest.raises(RuntimeError, match="closed"):
        thread.submit(dense, Task())
    thread.submit(experts, Task()).wait(DEADLINE)
    token.cancel("over")
    thread.close(experts)
    assert order == [*wanted, "experts"]
