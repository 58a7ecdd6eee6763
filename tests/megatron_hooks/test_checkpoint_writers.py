"""The process that writes checkpoints: nobody waits for one that is dead, or that has nothing to do."""

from __future__ import annotations

import queue
from dataclasses import dataclass, field
from typing import Any

import pytest
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest, PersistentAsyncCaller

from recover_megatron.megatron_hooks import checkpoint_writers
from recover_megatron.megatron_hooks.checkpoint_writers import WriterDied, WriterKilled, nothing

KILLED, FAILED = -9, 1


@dataclass
class Process:
    exitcode: int | None
    killed: bool = False

    def is_alive(self) -> bool:
        return self.exitcode is None

    def kill(self) -> None:
        self.killed = True


@dataclass
class Queue:
    """That of a process which never says that it has done what it was given."""

    items: list[Any] = field(default_factory=list)
    unread: queue.Queue[None] = field(default_factory=queue.Queue)

    def put(self, item: Any) -> None:
        self.items.append(item)
        self.unread.put(None)

    def join(self) -> None:
        self.unread.join()


@pytest.fixture
def caller(monkeypatch: pytest.MonkeyPatch) -> PersistentAsyncCaller:
    """Megatron's own, as the hooks wrap it, that has a process of ours."""
    for name in ("schedule_async_call", "is_current_async_call_done", "close"):
        monkeypatch.setattr(PersistentAsyncCaller, name, getattr(PersistentAsyncCaller, name))
    monkeypatch.setattr(filesystem_async, "get_write_results_queue", filesystem_async.get_write_results_queue)
    monkeypatch.setattr(PersistentAsyncCaller, "_persistent_queue", Queue())
    monkeypatch.setattr(PersistentAsyncCaller, "_persistent_preload_q", Queue())
    monkeypatch.setattr(PersistentAsyncCaller, "_persistent_comp_q", queue.Queue())
    monkeypatch.setattr(PersistentAsyncCaller, "_persistent_process", None)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    checkpoint_writers.install()
    return PersistentAsyncCaller()


@pytest.mark.parametrize(("code", "kind"), [(KILLED, WriterKilled), (FAILED, WriterDied)])
@pytest.mark.parametrize("blocking", [False, True])
def test_whoever_asks_a_dead_one_is_told(
    caller: PersistentAsyncCaller, code: int, kind: type[WriterDied], blocking: bool
) -> None:
    caller.process = Process(code)  # type: ignore[assignment]
    with pytest.raises(WriterDied) as raised:
        caller.is_current_async_call_done(blocking, True)
    assert type(raised.value) is kind
    caller.close()


def test_what_one_has_told_before_it_died_counts(caller: PersistentAsyncCaller) -> None:
    caller.process = Process(KILLED)  # type: ignore[assignment]
    caller._persistent_comp_q.put(4)
    assert caller.is_current_async_call_done(True, True)
    caller.close()


def test_one_that_dies_while_it_copies_is_not_waited_for(caller: PersistentAsyncCaller) -> None:
    caller.process = process = Process(None)  # type: ignore[assignment]
    copied = caller._persistent_preload_q

    def put(item: Any) -> None:
        Queue.put(copied, item)  # type: ignore[arg-type]
        process.exitcode = KILLED

    copied.put = put
    with pytest.raises(WriterKilled):
        caller.schedule_async_call(AsyncRequest(print, (), [], preload_fn=list))
    assert caller._persistent_preload_q is copied
    caller.close()


def test_one_without_a_part_in_a_checkpoint_is_given_something_to_be_done_with(caller: PersistentAsyncCaller) -> None:
    caller.process = Process(None)  # type: ignore[assignment]
    caller.schedule_async_call(AsyncRequest(None, (), [], call_idx=6))
    (given,) = caller._persistent_queue.items
    assert (given.async_fn, given.async_fn_args, given.call_idx) == (nothing, (), 6)
    caller.process = None


def test_a_dead_one_with_a_checkpoint_that_nobody_wants_is_replaced(caller: PersistentAsyncCaller) -> None:
    caller.process = process = Process(FAILED)  # type: ignore[assignment]
    checkpoint_writers.wait(caller)
    assert process.killed
    assert caller.process is None


def test_a_manager_that_is_gone_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem_async, "_results_queue", None)
    wrapped = checkpoint_writers._results_queue(filesystem_async.get_write_results_queue)
    first = wrapped("fork")
    assert wrapped("fork") is first
    first._manager._process.kill()
    first._manager._process.join()
    second = wrapped("fork")
    second.put("written")
    assert second.get() == "written"
    second._manager.shutdown()
